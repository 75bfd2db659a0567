// Axes in an SVG of the explorer, and how its numbers are written.
"use strict";

const Drawing = (() => {
  const LEFT = 46;
  const RIGHT = 12;
  const TOP = 10;
  const BOTTOM = 38;

  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1000 ? x.toFixed(0) : x.toPrecision(3));
  const weight = (p) => (p > 0 && p < 0.001 ? p.toExponential(1) : p.toFixed(3));
  const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
    const found = [];
    for (let x = Math.ceil(low / step); x * step <= high * (1 + 1e-9); x++) found.push(x * step);
    return found;
  }

  // Lines and numbers of the vertical axis.
  function rules([low, high], y, width, count = 4) {
    return ticks(low, high, count)
      .map(
        (t) =>
          `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}" y1="${y(t)}" y2="${y(t)}"/>` +
          `<text x="${LEFT - 6}" y="${y(t) + 4}" text-anchor="end">${+t.toPrecision(3)}</text>`,
      )
      .join("");
  }

  // Axes with what `draw(x, y)`, given the two maps to the page, adds to them.
  function plot(svg, { x: [x0, x1], y: [y0, y1], xTicks, xLog, xName, label }, draw) {
    const { width, height } = svg.viewBox.baseVal;
    const unit = (t, a, b) => (t - a) / (b - a);
    const x = (t) =>
      LEFT +
      (width - LEFT - RIGHT) *
        (xLog ? unit(Math.log(t), Math.log(x0), Math.log(x1)) : unit(t, x0, x1));
    const y = (t) => height - BOTTOM - (height - BOTTOM - TOP) * unit(t, y0, y1);
    const numbers = (xTicks ?? ticks(x0, x1, 5)).map(
      (t) =>
        `<text x="${x(t)}" y="${height - BOTTOM + 16}" text-anchor="middle">${+t.toPrecision(3)}</text>`,
    );
    svg.innerHTML = [
      rules([y0, y1], y, width),
      ...numbers,
      `<text x="${(LEFT + width - RIGHT) / 2}" y="${height - 4}" text-anchor="middle">${xName}</text>`,
      `<line class="axis" x1="${LEFT}" x2="${width - RIGHT}" y1="${y(y0)}" y2="${y(y0)}"/>`,
      draw(x, y),
    ].join("");
    svg.setAttribute("aria-label", label);
  }

  return { LEFT, RIGHT, TOP, clamp, short, weight, path, rules, plot };
})();
