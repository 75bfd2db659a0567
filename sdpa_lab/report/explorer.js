// The explorer: reads its knobs, draws, computes with attention.js, shows with drawing.js and
// steps.js. State is in the address; its scale is a name, or a number that the slider gave.
"use strict";

const Explorer = (() => {
  const D_MODEL = 64; // of images; also the width of v and g
  const DEAD = 0.01;
  const SATURATED = 0.99;
  const DEFAULTS = { input: "random", scale: "sqrt", d_k: 64, n: 16, rho: 0, seed: 0 };
  const SCALES = {
    sqrt: (d) => 1 / Math.sqrt(d),
    one: () => 1,
    half: (d) => 0.5 / Math.sqrt(d),
    log: (d) => 1 / Math.log(d),
    linear: (d) => 1 / d,
  };
  const LOWEST = -10; // of the slider: binary logarithms of the scale
  const HIGHEST = 2;
  const SECONDS = 10; // that playing takes from end to end
  const DRAWS = 40; // more of them show how far one scatters,
  const OUTSIDE = 1; // of which so many are left out at both ends
  const root = document.getElementById("explorer");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const form = root.querySelector("form");
  const find = (selector) => root.querySelector(selector);
  const { clamp, short, weight, path, plot } = Drawing;
  const { say, write } = Language;
  const chosen = (field, value) =>
    [...form.elements[field].options].find((option) => option.value === value)?.text ?? value;
  let current = null;
  let ghost = null; // what the setting before gave
  let turning = false; // a knob: many events, one ghost
  let motion = 0; // of requestAnimationFrame, while the scale plays
  let redrawing = 0; // of setTimeout, for the scatter
  const pair = { i: 0, j: 0 }; // that the map points at

  // ------------------------------------------------------------------ state

  const own = (exponent) => String(+(2 ** clamp(exponent, LOWEST, HIGHEST)).toPrecision(4));
  const factor = ({ scale, d_k: d }) => SCALES[scale]?.(d) ?? Number(scale);

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const state = { ...DEFAULTS };
    const integer = (name, low, high) => {
      const value = Number.parseInt(given.get(name), 10);
      if (Number.isFinite(value)) state[name] = clamp(value, low, high);
    };
    if (["random", "digits"].includes(given.get("input"))) state.input = given.get("input");
    const scale = given.get("scale") ?? "";
    if (Object.hasOwn(SCALES, scale)) state.scale = scale;
    else if (Number(scale) > 0) state.scale = own(Math.log2(Number(scale)));
    integer("d_k", 4, 512);
    integer("n", 4, 128);
    integer("seed", 0, 999999);
    for (const name of ["d_k", "n"]) state[name] = 2 ** Math.round(Math.log2(state[name]));
    const rho = Number.parseFloat(given.get("rho"));
    if (Number.isFinite(rho)) state.rho = clamp(Math.round(20 * rho) / 20, 0, 1);
    return state;
  }

  function readForm() {
    const field = form.elements;
    return {
      input: field.input.value,
      scale: field.scale.value === "own" ? own(Number(field.factor.value)) : field.scale.value,
      d_k: 2 ** Number(field.d_k.value),
      n: 2 ** Number(field.n.value),
      rho: Number(field.rho.value) / 100,
      seed: clamp(Math.trunc(Number(field.seed.value) || 0), 0, 999999),
    };
  }

  function writeForm(state) {
    const field = form.elements;
    for (const name of ["input", "seed"]) field[name].value = state[name];
    field.scale.value = state.scale in SCALES ? state.scale : "own";
    field.factor.value = Math.log2(factor(state));
    field.d_k.value = Math.log2(state.d_k);
    field.n.value = Math.log2(state.n);
    field.rho.value = Math.round(100 * state.rho);
  }

  // ------------------------------------------------------------------ inputs

  function images(n, random) {
    const pixels = Float64Array.from(data.digits.slice(0, 8 * n), (x) => (x - data.mean) / data.std);
    const map = Attention.normal(random, 8 * D_MODEL).map((x) => x / Math.sqrt(8));
    const x = Attention.product(pixels, map, n, 8, D_MODEL, false);
    for (let i = 0; i < n; i++) {
      for (let c = 0; c < D_MODEL; c++) {
        const angle = (i % 8) / 10000 ** ((c - (c % 2)) / D_MODEL);
        x[i * D_MODEL + c] += c % 2 ? Math.cos(angle) : Math.sin(angle);
      }
    }
    const rms = Math.sqrt(x.reduce((sum, y) => sum + y * y, 0) / x.length);
    return x.map((y) => y / rms);
  }

  // Playing the scale asks for the same draw again and again.
  let last = { key: null };
  function operands({ input, d_k, n, rho, seed }) {
    const key = JSON.stringify([input, d_k, n, rho, seed]);
    if (last.key !== key) last = { key, drawn: draw({ input, d_k, n, rho, seed }) };
    return last.drawn;
  }

  function draw({ input, d_k: d, n, rho, seed }) {
    const random = Attention.uniform(seed);
    const rest = Math.sqrt(1 - rho * rho);
    const mixed = (a, b) => a.map((x, i) => rho * x + rest * b[i]);
    if (input === "random") {
      const [q, z, v, g] = [d, d, D_MODEL, D_MODEL].map((w) => Attention.normal(random, n * w));
      return { q, k: mixed(q, z), v, g };
    }
    const x = images(n, random);
    const [wq, other, wv] = [d, d, D_MODEL].map((w) =>
      Attention.normal(random, D_MODEL * w).map((y) => y / Math.sqrt(D_MODEL)),
    );
    const [q, k, v] = [[wq, d], [mixed(wq, other), d], [wv, D_MODEL]].map(([w, width]) =>
      Attention.product(x, w, n, D_MODEL, width, false),
    );
    return { q, k, v, g: Attention.normal(random, n * D_MODEL) };
  }

  const mean = (a) => a.reduce((sum, x) => sum + x, 0) / a.length;
  const meanSquare = (a) => mean(a.map((x) => x * x));

  // Mean squared norms of the gradients' rows over g, and over v where its rows are independent:
  // sdpa_lab.experiments.scale derives them.
  function expectedSquares({ input, n, d_k: d }, scale, q, k, p, { jacobian }) {
    const laws = { V: D_MODEL * n * meanSquare(p) };
    if (input !== "random") return laws;
    const means = Attention.product(p, k, n, n, d, false);
    laws.S = D_MODEL * meanSquare(jacobian);
    laws.Q = laws.K = 0;
    for (let i = 0; i < n; i++) {
      let square = 0;
      for (let c = 0; c < d; c++) square += q[i * d + c] ** 2;
      laws.K += (scale ** 2 * D_MODEL * square * jacobian[i] ** 2) / n;
      for (let j = 0; j < n; j++) {
        let distance = 0;
        for (let c = 0; c < d; c++) distance += (k[j * d + c] - means[i * d + c]) ** 2;
        laws.Q += (scale ** 2 * D_MODEL * p[i * n + j] ** 2 * distance) / n;
      }
    }
    return laws;
  }

  function compute(state) {
    const { n, d_k: d } = state;
    const scale = factor(state);
    const drawn = operands(state);
    const { q, k } = drawn;
    const result = Attention.attention(drawn, n, d, D_MODEL, scale);
    const rows = Attention.rowStatistics(result.p, n);
    const laws = expectedSquares(state, scale, q, k, result.p, rows);
    const gradients = [
      ["S", result.ds, n],
      ["Q", result.dq, d],
      ["K", result.dk, d],
      ["V", result.dv, D_MODEL],
    ].map(([to, a, width]) => {
      const { norms, rms, median } = Attention.rowNorms(a, width);
      const dead = norms.filter((x) => x < DEAD * Math.sqrt(D_MODEL)).length / n;
      return { to, rms, median, dead, law: to in laws ? Math.sqrt(laws[to]) : null };
    });
    const { total, within } = Attention.variances(result.s, n);
    return {
      state,
      scale,
      operands: drawn,
      result,
      gradients,
      total,
      within,
      entropy: mean(rows.entropy),
      largest: mean(rows.largest),
      saturated: rows.largest.filter((x) => x > SATURATED).length / n,
      jacobian: Math.sqrt(meanSquare(rows.jacobian)),
    };
  }

  // ------------------------------------------------------------------ drawing

  const says = (picture, text) => {
    find(picture).closest("figure").querySelector("figcaption").textContent = text;
  };

  // Heights of equal bars from -end to end, of area 1 in all.
  function histogram({ state: { n, d_k: d }, scale, result }) {
    const end = Math.max(3.5 * scale * Math.sqrt(d), ...result.s.map(Math.abs)) * 1.02;
    const bins = clamp(2 * Math.round(Math.sqrt(n * n) / 2) + 9, 15, 49);
    const width = (2 * end) / bins;
    const heights = new Float64Array(bins);
    for (const s of result.s) {
      heights[Math.min(bins - 1, Math.floor((s + end) / width))] += 1 / (n * n) / width;
    }
    return { end, width, heights };
  }

  function drawHistogram(found) {
    const { state, scale, total } = found;
    const { n, d_k: d, rho, input } = state;
    const independent = scale * Math.sqrt(d);
    const gauss = (x, mean, sd) => Math.exp(-(((x - mean) / sd) ** 2) / 2) / sd / Math.sqrt(2 * Math.PI);
    const density = (x) =>
      ((n - 1) * gauss(x, 0, independent) +
        gauss(x, rho * scale * d, independent * Math.sqrt(1 + rho * rho))) / n;
    const bars = histogram(found);
    const before = ghost && histogram(ghost);
    // A ghost that is much wider or higher is cut rather than squeezing what is shown.
    const end = before ? clamp(before.end, bars.end, 4 * bars.end) : bars.end;
    const curve = Array.from({ length: 401 }, (_, i) => end * (i / 200 - 1));
    const law = input === "random" ? curve.map(density) : [];
    const own = 1.08 * Math.max(...bars.heights, ...law);
    const top = before ? clamp(1.08 * Math.max(...before.heights), own, 3 * own) : own;
    const outline = ({ end: e, width, heights }, x, y) =>
      path(
        Array.from(heights, (h, i) => [-e + i * width, -e + (i + 1) * width, Math.min(h, top)])
          .filter(([a, b]) => a < end && b > -end)
          .map(([a, b, h]) => [Math.max(a, -end), Math.min(b, end), h])
          .flatMap(([a, b, h]) => [[x(a), y(h)], [x(b), y(h)]]),
      );
    const compared = law.length ? say("script-compared", { std: short(independent) }) : "";
    const label = say("script-histogram", {
      pairs: n * n,
      low: short(-bars.end),
      high: short(bars.end),
      std: short(Math.sqrt(total)),
      compared,
    });
    says(".histogram", say(law.length ? "script-law-drawn" : "script-no-law"));
    const axes = { x: [-end, end], y: [0, top], xName: say("script-score"), label };
    plot(find(".histogram"), axes, (x, y) => {
      const rectangles = Array.from(bars.heights, (h, i) => {
        const [a, b] = [x(-bars.end + i * bars.width), x(-bars.end + (i + 1) * bars.width)];
        return `<rect class="bar" x="${a}" width="${Math.max(0.5, b - a - 0.5)}" y="${y(h)}" height="${y(0) - y(h)}"/>`;
      });
      if (before) rectangles.push(`<path class="ghost" d="${outline(before, x, y)}"/>`);
      if (law.length) {
        rectangles.push(`<path class="law" d="${path(curve.map((t, i) => [x(t), y(law[i])]))}"/>`);
      }
      return rectangles.join("");
    });
  }

  function drawWeights(canvas, { state: { n }, result, largest }) {
    canvas.width = canvas.height = n;
    const context = canvas.getContext("2d");
    const image = context.createImageData(n, n);
    result.p.forEach((p, i) => {
      const [r, g, b] = data.colors[Math.round(p * (data.colors.length - 1))];
      image.data.set([r, g, b, 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", say("script-map", { n, largest: short(largest) }));
  }

  function drawCurve(name, top, found) {
    const { sigma, curves } = data;
    const { n, input, rho } = found.state;
    const applies = input === "random" && rho === 0;
    const place = (x, y, of) => [
      x(clamp(Math.sqrt(of.within), sigma[0], sigma.at(-1))),
      y(Math.min(of[name], top)),
    ];
    const circle = (kind, [cx, cy]) => `<circle class="${kind}" cx="${cx}" cy="${cy}" r="6"/>`;
    const drawn = applies ? "law" : "reference";
    const what = say(`script-${name}`);
    const std = short(Math.sqrt(found.within));
    const label = say("script-curve", { what, value: short(found[name]), std, n });
    says(`.${name}`, say(applies ? "script-applies" : "script-applies-not", { what }));
    const xTicks = [0.1, 0.3, 1, 3, 10, 30];
    const axes = { x: [sigma[0], sigma.at(-1)], y: [0, top], xTicks, xLog: true, label };
    plot(find(`.${name}`), { ...axes, xName: say("script-within") }, (x, y) => {
      const parts = [
        `<path class="${drawn}" d="${path(sigma.map((t, i) => [x(t), y(curves[n][name][i])]))}"/>`,
      ];
      if (ghost) {
        const [from, to] = [place(x, y, ghost), place(x, y, found)];
        parts.push(`<path class="ghost" d="${path([from, to])}"/>`, circle("ghost", from));
      }
      return [...parts, circle("point", place(x, y, found))].join("");
    });
  }

  function drawGhost() {
    for (const shown of root.querySelectorAll(".before")) shown.hidden = !ghost;
    if (ghost) {
      drawWeights(find(".maps .before canvas"), ghost);
      const { input, scale, rho, ...rest } = ghost.state;
      find(".previous").textContent = say("script-previous", {
        ...rest,
        input: chosen("input", input),
        scale: chosen("scale", scale),
        rho: rho.toFixed(2),
      });
    }
  }

  function drawKnobs({ state, scale }) {
    const { d_k, n, rho, seed, input } = state;
    const shown = { factor: short(scale), d_k, n, rho: rho.toFixed(2) };
    for (const [knob, text] of Object.entries(shown)) {
      find(`[data-shows=${knob}]`).textContent = text;
      form.elements[knob].setAttribute("aria-valuetext", text);
    }
    find("[data-shows=others]").textContent = say("script-others", {
      ...shown,
      input: input === "random" ? "N(0, 1)" : say("script-digits"),
      seed,
    });
    const share = (Math.log2(1 / Math.sqrt(d_k)) - LOWEST) / (HIGHEST - LOWEST);
    find(".mark").style.setProperty("--at", share);
  }

  // The row and the column that the pointer or the keys have chosen, and what is there.
  function drawPair({ state: { n }, scale, result: { s, p } }) {
    for (const end of ["i", "j"]) pair[end] = clamp(pair[end], 0, n - 1);
    const { i, j } = pair;
    const at = i * n + j;
    Object.assign(find(".map .row").style, { top: `${(100 * i) / n}%`, height: `${100 / n}%` });
    Object.assign(find(".map .column").style, { left: `${(100 * j) / n}%`, width: `${100 / n}%` });
    find(".pair").textContent = say("script-pair", {
      i,
      j,
      product: short(s[at] / scale),
      score: short(s[at]),
      weight: weight(p[at]),
    });
    Steps.show(current, pair);
  }

  function point(i, j) {
    const { n } = current.state;
    const to = { i: clamp(i, 0, n - 1), j: clamp(j, 0, n - 1) };
    if (to.i === pair.i && to.j === pair.j) return;
    Object.assign(pair, to);
    drawPair(current);
  }

  // What other draws of g, and of v where its rows are independent, give with the same scores: one
  // draw at a time, so that knobs turn meanwhile.
  function drawScatter(found) {
    clearTimeout(redrawing);
    const { state: { n, d_k: d, seed, input }, operands: given, result: { p }, scale } = found;
    const random = Attention.uniform(1000000 + seed);
    const squares = { S: [], Q: [], K: [], V: [] };
    const cells = [...root.querySelectorAll(".gradients .scatter")];
    const next = () => {
      const fresh = () => Attention.normal(random, n * D_MODEL);
      const v = input === "random" ? fresh() : given.v;
      const found = Attention.gradients({ ...given, v, g: fresh() }, p, n, d, D_MODEL, scale);
      for (const to of "SQKV") {
        squares[to].push(meanSquare(found[`d${to.toLowerCase()}`]) * { S: n, Q: d, K: d, V: D_MODEL }[to]);
      }
      if (squares.S.length < DRAWS) {
        redrawing = setTimeout(next);
        return;
      }
      [..."SQKV"].forEach((to, place) => {
        const sorted = squares[to].map(Math.sqrt).sort((a, b) => a - b);
        cells[place].textContent = `${short(sorted[OUTSIDE])} – ${short(sorted.at(-1 - OUTSIDE))}`;
      });
      root.dataset.settled = "";
    };
    delete root.dataset.settled;
    redrawing = setTimeout(next, 200);
  }

  function drawGradients({ gradients }) {
    find(".gradients tbody").innerHTML = gradients
      .map(({ to, rms, law, median, dead }, i) => {
        const before = ghost ? [short(ghost.gradients[i].rms)] : [];
        const cells = [short(rms), ...before, law === null ? "" : short(law)];
        const rest = [short(median), (100 * dead).toFixed(0)];
        const [left, right] = [cells, rest].map((a) => a.map((c) => `<td>${c}</td>`).join(""));
        return `<tr><th scope="row">dL/d${to}</th>${left}<td class="scatter">…</td>${right}</tr>`;
      })
      .join("");
  }

  function show(found) {
    const { state: { n }, scale } = found;
    find(".summary").textContent = say("script-summary", {
      n,
      scale: short(scale),
      total: short(Math.sqrt(found.total)),
      within: short(Math.sqrt(found.within)),
      entropy: found.entropy.toFixed(3),
      most: Math.log(n).toFixed(3),
      largest: found.largest.toFixed(3),
      share: (100 * found.saturated).toFixed(0),
      saturated: SATURATED,
      jacobian: short(found.jacobian),
    });
    drawKnobs(found);
    drawHistogram(found);
    drawWeights(find(".weights"), found);
    const most = Math.log(Math.max(n, ghost ? ghost.state.n : n));
    drawCurve("entropy", 1.05 * most, found);
    drawCurve("jacobian", 0.6, found);
    drawGhost();
    drawGradients(found);
    drawPair(found);
    drawScatter(found);
  }

  // ------------------------------------------------------------------ knobs

  function update(state) {
    current = compute(state);
    show(current);
  }

  // The page may be part of a report: an address that was not ours stays until a knob is turned.
  // Browsers refuse a new address for every step of a slider.
  function remember() {
    history.replaceState(current.state, "", `#${new URLSearchParams(current.state)}`);
  }

  function turned() {
    if (!turning) ghost = current;
    turning = true;
    const state = readForm();
    writeForm(state);
    update(state);
  }

  function rested() {
    turning = false;
    remember();
  }

  function pause() {
    if (!motion) return;
    cancelAnimationFrame(motion);
    motion = 0;
    write(form.elements.play, "script-play");
    find(".summary").setAttribute("aria-live", "polite");
    rested();
  }

  // From where the scale is to the largest; by whole octaves for those who want less motion.
  function play() {
    const slider = form.elements.factor;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const from = Number(slider.value) < HIGHEST ? Number(slider.value) : LOWEST;
    const start = performance.now();
    const frame = (now) => {
      const way = (Math.max(0, now - start) / 1000 / SECONDS) * (HIGHEST - LOWEST);
      const exponent = Math.min(HIGHEST, from + (still ? Math.floor(way) : way));
      if (exponent !== Number(slider.value) || form.elements.scale.value !== "own") {
        form.elements.scale.value = "own";
        slider.value = exponent;
        turned();
      }
      if (exponent === HIGHEST) pause();
      else motion = requestAnimationFrame(frame);
    };
    write(form.elements.play, "script-pause");
    find(".summary").setAttribute("aria-live", "off");
    motion = requestAnimationFrame(frame);
  }

  // Settings are in the address; behind a link to a section, in the entry of the history.
  function start() {
    const state = location.hash.includes("=") ? readAddress() : (history.state ?? readAddress());
    pause();
    ghost = current;
    writeForm(state);
    update(state);
  }

  form.addEventListener("input", ({ target }) => {
    pause();
    if (target.name === "factor") form.elements.scale.value = "own";
    turned();
    if (target.type !== "range") remember();
  });
  form.addEventListener("change", rested);
  form.elements.redraw.addEventListener("click", () => {
    form.elements.seed.value = (readForm().seed + 1) % 1000000;
    pause();
    turned();
    rested();
  });
  form.elements.play.addEventListener("click", () => (motion ? pause() : play()));

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const map = find(".map");
  for (const kind of ["pointermove", "pointerdown"]) {
    map.addEventListener(kind, ({ clientX, clientY }) => {
      const { left, top, width, height } = map.getBoundingClientRect();
      const { n } = current.state;
      point(Math.floor(((clientY - top) / height) * n), Math.floor(((clientX - left) / width) * n));
    });
  }
  map.addEventListener("keydown", (event) => {
    const end = { Home: 0, End: current.state.n - 1 }[event.key];
    const [down, right] = STEPS[event.key] ?? [0, 0];
    if (end === undefined && !STEPS[event.key]) return;
    point(pair.i + down, end ?? pair.j + right);
    event.preventDefault();
  });

  // On a phone only the scale stays beside the pictures until the other knobs are asked for.
  const wide = matchMedia("(min-width: 48rem)");
  const more = find(".more");
  const fold = () => {
    more.open = wide.matches;
  };
  wide.addEventListener("change", fold);
  fold();

  // Knobs stick below what a report has there.
  const above = document.querySelector("nav");
  if (above) {
    new ResizeObserver(() => {
      root.style.setProperty("--above", `${above.offsetHeight}px`);
    }).observe(above);
  }

  document.addEventListener("language", () => show(current));
  window.addEventListener("hashchange", () => {
    if (location.hash.includes("=")) start();
    else history.replaceState(current.state, "", location.hash);
  });
  const steps = data.colors.map((color) => `rgb(${color})`);
  find(".colors i").style.background = `linear-gradient(to right, ${steps})`;
  start();
  return { current: () => current, pair: () => ({ ...pair }) };
})();
