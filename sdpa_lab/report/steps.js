// From the products of one query and one key to their sum, the scores of the row and its weights.
// Bars move from each step to the next: those of the products become the one bar of their sum.
"use strict";

const Steps = (() => {
  const LAST = 3;
  const SECONDS = 1.6; // from one step to the next
  const BOTTOM = 24;
  const { LEFT, RIGHT, TOP, clamp, short, weight, path, rules } = Drawing;
  const { say, write } = Language;
  const figure = document.querySelector("#explorer .steps");
  const svg = figure.querySelector("svg");
  const choices = [...figure.querySelectorAll("[name=step]")];
  const button = figure.querySelector("button");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let place = LAST; // of the step that is drawn; between two steps while bars move
  let motion = 0; // of requestAnimationFrame
  let shown = null;

  // The numbers of every step.
  function numbers({ state: { n, d_k: d }, operands: { q, k }, scale, result }, { i, j }) {
    const products = Array.from({ length: d }, (_, c) => q[i * d + c] * k[j * d + c]);
    const sums = [0];
    for (const x of products) sums.push(sums.at(-1) + x);
    const sum = sums.at(-1);
    const row = (a) => Array.from(a.subarray(i * n, i * n + n));
    return { products, sums, sum, score: scale * sum, scores: row(result.s), weights: row(result.p) };
  }

  const largest = (a) => a.reduce((most, x) => Math.max(most, Math.abs(x)), 0);

  // Ends of the axis of each step. Those of scores go by factors of four, so that bars grow in them.
  function ranges({ products, sums, scores }, d) {
    const most = 1.1 * largest(products);
    const walk = 1.05 * Math.max(largest(sums), 2 * Math.sqrt(d));
    const score = 4 ** Math.max(0, Math.ceil(Math.log(1.001 * largest(scores)) / Math.log(4)));
    return [[-most, most], [-walk, walk], [-score, score], [0, 1]];
  }

  // The rectangles of step `at`: of every product, then of every key of the row.
  function rectangles(at, found, { j }, [low, high], width, height) {
    const { products, sums, scores, weights } = found;
    const [d, n] = [products.length, scores.length];
    const inner = width - LEFT - RIGHT;
    const y = (t) => height - BOTTOM - ((height - BOTTOM - TOP) * (t - low)) / (high - low);
    const bar = (slot, count, from, to) => {
      const gap = Math.min(2, (0.2 * inner) / count);
      const [a, b] = [y(from), y(to)];
      const x = LEFT + (slot * inner) / count + gap / 2;
      return [x, Math.min(a, b), inner / count - gap, Math.max(0.5, Math.abs(a - b))];
    };
    const row = at === 3 ? weights : scores;
    const one = bar(j, n, 0, row[j]);
    return {
      y,
      parts: products.map((x, c) =>
        at === 0 ? bar(c, d, 0, x) : at === 1 ? bar(c, d, sums[c], sums[c + 1]) : one,
      ),
      row: row.map((x, k) => bar(k, n, 0, at < 2 ? 0 : x)),
    };
  }

  // Curves and lines of a step: the law of the sum, or the weight if all were equal.
  function references(at, { products, scores }, applies, y, width) {
    const [d, n] = [products.length, scores.length];
    const inner = width - LEFT - RIGHT;
    if (at === 1 && applies) {
      const curve = (sign) =>
        Array.from({ length: 65 }, (_, t) => [LEFT + (inner * t) / 64, y(sign * Math.sqrt((d * t) / 64))]);
      return [1, -1].map((sign) => `<path class="law" d="${path(curve(sign))}"/>`).join("");
    }
    if (at < 3) return "";
    return `<path class="reference" d="M${LEFT} ${y(1 / n)}H${width - RIGHT}"/>`;
  }

  function caption(at, { products, sum, score, scores, weights }, { i, j }, { scale, state }) {
    const [d, n] = [products.length, scores.length];
    const best = weights.indexOf(Math.max(...weights));
    const name = ["script-products", "script-sum", "script-scores", "script-softmax"][at];
    return say(name, {
      d,
      n,
      i,
      j,
      best,
      sum: short(sum),
      law: applies(state) ? say("script-sum-law", { d, root: short(Math.sqrt(d)) }) : "",
      scale: short(scale),
      score: short(score),
      weight: weight(weights[j]),
      most: weight(weights[best]),
    });
  }

  const applies = ({ input, rho }) => input === "random" && rho === 0;
  // From 0 to 1, with a rest at both ends.
  const smooth = (t) => {
    const way = clamp((t - 0.2) / 0.6, 0, 1);
    return way * way * (3 - 2 * way);
  };

  function draw() {
    const { found, pair } = shown;
    const width = Math.max(280, svg.clientWidth);
    const height = 240;
    const all = numbers(found, pair);
    const axes = ranges(all, all.products.length);
    const nearest = Math.round(place);
    const from = Math.min(LAST - 1, Math.floor(place));
    const t = smooth(place - from);
    const [a, b] = [from, from + 1].map((at) => rectangles(at, all, pair, axes[at], width, height));
    const between = (p, q) => p.map((x, c) => x + t * (q[c] - x));
    const rect = (kind, ends) => {
      const [x, y, w, h] = ends.map((end) => end.toFixed(2));
      return `<rect class="${kind}" x="${x}" y="${y}" width="${w}" height="${h}"/>`;
    };
    // Products that have arrived at their sum are one bar of the row, which is drawn once.
    const parts = place < 2 ? a.parts.map((p, c) => rect("chosen", between(p, b.parts[c]))) : [];
    const row = a.row.map((p, k) => rect(k === pair.j ? "chosen" : "bar", between(p, b.row[k])));
    const keys = place > 1 ? row.filter((_, k) => place >= 2 || k !== pair.j) : [];
    const y = (nearest === from ? a : b).y;
    const fade = clamp(2 - 5 * Math.abs(place - nearest), 0, 1);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.innerHTML = [
      `<g opacity="${fade.toFixed(2)}">${rules(axes[nearest], y, width, 6)}</g>`,
      ...parts,
      ...keys,
      `<line class="axis" x1="${LEFT}" x2="${width - RIGHT}" y1="${y(0)}" y2="${y(0)}" opacity="${fade.toFixed(2)}"/>`,
      `<g opacity="${fade.toFixed(2)}">${references(nearest, all, applies(found.state), y, width)}</g>`,
      `<text x="${(LEFT + width - RIGHT) / 2}" y="${height - 4}" text-anchor="middle">` +
        `${say(nearest < 2 ? "script-component" : "script-key")}</text>`,
    ].join("");
    const text = caption(nearest, all, pair, found);
    figure.querySelector(".said").textContent = text;
    svg.setAttribute("aria-label", text);
  }

  function stop() {
    cancelAnimationFrame(motion);
    motion = 0;
    write(button, "script-play");
  }

  function moved(to) {
    place = to;
    draw();
  }

  // Backwards three times as fast.
  function glide(to, then = () => {}) {
    stop();
    const [began, start] = [performance.now(), place];
    const frame = (now) => {
      const way = Math.max(0, now - began) / 1000 / SECONDS;
      moved(start < to ? Math.min(to, start + way) : Math.max(to, start - 3 * way));
      then();
      if (place === to) stop();
      else motion = requestAnimationFrame(frame);
    };
    motion = requestAnimationFrame(frame);
  }

  const follow = () => {
    choices[Math.round(place)].checked = true;
  };

  // Where less motion is wanted, a step at a time.
  function play() {
    if (motion) {
      stop();
      moved(Math.round(place));
    } else if (still.matches) {
      moved((place + 1) % (LAST + 1));
    } else {
      if (place === LAST) place = 0;
      glide(LAST, follow);
      write(button, "script-pause");
    }
    follow();
  }

  choices.forEach((choice, at) =>
    choice.addEventListener("change", () => (still.matches ? moved(at) : glide(at))),
  );
  choices[LAST].checked = true;
  button.addEventListener("click", play);
  new ResizeObserver(() => shown && draw()).observe(svg);

  return {
    // Draws query i and key j of what the explorer found.
    show(found, pair) {
      shown = { found, pair };
      draw();
    },
    place: () => place,
  };
})();
