// The explorer: reads its knobs, draws, computes with attention.js, shows. State is in the address.
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
  const root = document.getElementById("explorer");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const form = root.querySelector("form");
  const find = (selector) => root.querySelector(selector);
  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1000 ? x.toFixed(0) : x.toPrecision(3));
  const { say } = Language;
  const chosen = (field, value) =>
    [...form.elements[field].options].find((option) => option.value === value).text;
  let current = null;
  let ghost = null; // what the setting before gave
  let turning = false; // a knob: many events, one ghost

  // ------------------------------------------------------------------ state

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const state = { ...DEFAULTS };
    const integer = (name, low, high) => {
      const value = Number.parseInt(given.get(name), 10);
      if (Number.isFinite(value)) state[name] = clamp(value, low, high);
    };
    if (["random", "digits"].includes(given.get("input"))) state.input = given.get("input");
    if (Object.hasOwn(SCALES, given.get("scale") ?? "")) state.scale = given.get("scale");
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
      scale: field.scale.value,
      d_k: 2 ** Number(field.d_k.value),
      n: 2 ** Number(field.n.value),
      rho: Number(field.rho.value) / 100,
      seed: clamp(Math.trunc(Number(field.seed.value) || 0), 0, 999999),
    };
  }

  function writeForm(state) {
    const field = form.elements;
    for (const name of ["input", "scale", "seed"]) field[name].value = state[name];
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

  function operands({ input, d_k: d, n, rho, seed }) {
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
    const scale = SCALES[state.scale](d);
    const { q, k, v, g } = operands(state);
    const result = Attention.attention(q, k, v, g, n, d, D_MODEL, scale);
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
      operands: { q, k, v, g },
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

  const plain = { left: 46, right: 12, top: 10, bottom: 38, width: 400, height: 240 };

  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
    const found = [];
    for (let x = Math.ceil(low / step); x * step <= high * (1 + 1e-9); x++) found.push(x * step);
    return found;
  }

  // Axes with what `draw(x, y)`, given the two maps to the page, adds to them.
  function plot(svg, { x: [x0, x1], y: [y0, y1], xTicks, xLog, xName, label }, draw) {
    const { left, right, top, bottom, width, height } = plain;
    const unit = (t, a, b) => (t - a) / (b - a);
    const x = (t) =>
      left +
      (width - left - right) *
        (xLog ? unit(Math.log(t), Math.log(x0), Math.log(x1)) : unit(t, x0, x1));
    const y = (t) => height - bottom - (height - bottom - top) * unit(t, y0, y1);
    const parts = [];
    for (const t of ticks(y0, y1, 4)) {
      parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y(t)}" y2="${y(t)}"/>`);
      parts.push(`<text x="${left - 6}" y="${y(t) + 4}" text-anchor="end">${+t.toPrecision(3)}</text>`);
    }
    for (const t of xTicks ?? ticks(x0, x1, 5)) {
      parts.push(
        `<text x="${x(t)}" y="${height - bottom + 16}" text-anchor="middle">${+t.toPrecision(3)}</text>`,
      );
    }
    parts.push(
      `<text x="${(left + width - right) / 2}" y="${height - 4}" text-anchor="middle">${xName}</text>`,
      `<line class="axis" x1="${left}" x2="${width - right}" y1="${y(y0)}" y2="${y(y0)}"/>`,
      draw(x, y),
    );
    svg.innerHTML = parts.join("");
    svg.setAttribute("aria-label", label);
  }

  const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

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
          .filter(([a, b]) => a >= -end * 1.001 && b <= end * 1.001)
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

  function show(found) {
    const { state, scale, gradients } = found;
    const { n } = state;
    const shown = { d_k: state.d_k, n, rho: state.rho.toFixed(2) };
    for (const [name, text] of Object.entries(shown)) {
      find(`[data-shows=${name}]`).textContent = text;
      form.elements[name].setAttribute("aria-valuetext", text);
    }
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
    drawHistogram(found);
    drawWeights(find(".weights"), found);
    const most = Math.log(Math.max(n, ghost ? ghost.state.n : n));
    drawCurve("entropy", 1.05 * most, found);
    drawCurve("jacobian", 0.6, found);
    drawGhost();
    find(".gradients tbody").innerHTML = gradients
      .map(({ to, rms, law, median, dead }, i) => {
        const before = ghost ? [short(ghost.gradients[i].rms)] : [];
        const cells = [short(rms), ...before, law === null ? "" : short(law), short(median)];
        cells.push((100 * dead).toFixed(0));
        return `<tr><th scope="row">dL/d${to}</th>${cells.map((c) => `<td>${c}</td>`).join("")}</tr>`;
      })
      .join("");
  }

  function update(state) {
    current = compute(state);
    show(current);
  }

  // The page may be part of a report: an address that was not ours stays until a knob is turned.
  function turned() {
    if (!turning) ghost = current;
    turning = true;
    const state = readForm();
    history.replaceState(state, "", `#${new URLSearchParams(state)}`);
    update(state);
  }

  // Settings are in the address; behind a link to a section, in the entry of the history.
  function start() {
    const state = location.hash.includes("=") ? readAddress() : (history.state ?? readAddress());
    ghost = current;
    writeForm(state);
    update(state);
  }

  form.addEventListener("input", turned);
  form.addEventListener("change", () => {
    turning = false;
  });
  form.elements.redraw.addEventListener("click", () => {
    form.elements.seed.value = (readForm().seed + 1) % 1000000;
    turned();
    turning = false;
  });
  document.addEventListener("language", () => show(current));
  window.addEventListener("hashchange", () => {
    if (location.hash.includes("=")) start();
    else history.replaceState(current.state, "", location.hash);
  });
  const steps = data.colors.map((color) => `rgb(${color})`);
  find(".colors i").style.background = `linear-gradient(to right, ${steps})`;
  start();
  return { current: () => current };
})();
