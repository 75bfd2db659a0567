// The page of sdpa.plot.view: maps of heads side by side, and lines between two columns of tokens.
// One pair (query i, key j) is current everywhere; a weight is largest * (byte / 255)^2.
"use strict";

const View = (() => {
  const ROW = 22; // pixels of a token, as in the style sheet
  const RANKED = 10;
  const FIRST_SHOWN = 8;
  const MOST_LINES = 20000; // which a processor draws in a tenth of a second
  const data = JSON.parse(document.getElementById("data").textContent);
  const { heads, queries, keys, largest } = data;
  const find = (selector) => document.querySelector(selector);
  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const make = (name, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };
  const shown = new Set(Array.from({ length: Math.min(heads, FIRST_SHOWN) }, (_, h) => h));
  const current = { i: 0, j: 0 };
  const maps = []; // of each head: figure, canvas, row, column
  let bytes = null;
  let least = 64;

  const weight = (byte) => largest * (byte / 255) ** 2;
  const at = (head, i, j) => bytes[(head * queries + i) * keys + j];
  const text = (x) => (x === 0 ? "0" : x < 0.001 ? x.toExponential(1) : x.toFixed(3));
  const named = (tokens, index) => (tokens ? tokens[index] : String(index));
  const place = (tokens, index) => (tokens ? `${index} “${tokens[index]}”` : String(index));
  const style = () => getComputedStyle(document.documentElement);
  const color = (name) => style().getPropertyValue(`--${name}`).trim();
  const rgb = (name) => [1, 3, 5].map((k) => Number.parseInt(color(name).slice(k, k + 2), 16));
  const swatch = (head) => {
    const mark = make("span", { className: "swatch", ariaHidden: "true" });
    mark.style.background = `var(--head${head % 8})`;
    return mark;
  };

  async function unpack() {
    const packed = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // ------------------------------------------------------------------ maps

  // 256 colours, low to middle to high.
  function palette() {
    const stops = ["low", "middle", "high"].map(rgb);
    return Array.from({ length: 256 }, (_, byte) => {
      const t = (2 * byte) / 255;
      const [a, b] = t < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
      return a.map((x, c) => Math.round(x + (b[c] - x) * (t < 1 ? t : t - 1)));
    });
  }

  // The bytes of a head on (rows, columns) pixels; one that covers several weights has the largest.
  function pooled(head, rows, columns) {
    const result = new Uint8Array(rows * columns);
    for (let i = 0; i < queries; i++) {
      const row = Math.floor((i * rows) / queries) * columns;
      for (let j = 0; j < keys; j++) {
        const pixel = row + Math.floor((j * columns) / keys);
        result[pixel] = Math.max(result[pixel], at(head, i, j));
      }
    }
    return result;
  }

  function drawMaps() {
    const colors = palette();
    const ratio = window.devicePixelRatio || 1;
    maps.forEach(({ figure, canvas }, head) => {
      figure.hidden = !shown.has(head);
      if (figure.hidden) return;
      const box = canvas.getBoundingClientRect();
      canvas.width = Math.min(keys, Math.ceil(box.width * ratio));
      canvas.height = Math.min(queries, Math.ceil(box.height * ratio));
      const context = canvas.getContext("2d");
      const image = context.createImageData(canvas.width, canvas.height);
      pooled(head, canvas.height, canvas.width).forEach((byte, k) => {
        const [r, g, b] = colors[byte];
        image.data.set([r, g, b, 255], 4 * k);
      });
      context.putImageData(image, 0, 0);
    });
    find("#scale i").style.background =
      `linear-gradient(to right, ${colors.map((c) => `rgb(${c})`)})`;
  }

  function addMap(head) {
    const label = `Head ${head}: ${queries} queries by ${keys} keys; arrow keys move the pair`;
    const canvas = make("canvas", { ariaHidden: "true" });
    canvas.style.aspectRatio = `${keys} / ${clamp(queries, keys / 8, 2 * keys)}`;
    const [row, column] = ["row", "column"].map((className) => make("i", { className }));
    const map = make("div", { className: "map", tabIndex: 0 }, canvas, row, column);
    map.setAttribute("role", "img");
    map.setAttribute("aria-label", label);
    const follow = (event) => {
      const box = canvas.getBoundingClientRect();
      const unit = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      move(Math.floor(unit[0] * queries), Math.floor(unit[1] * keys));
    };
    map.addEventListener("pointermove", follow);
    map.addEventListener("pointerdown", follow);
    map.addEventListener("keydown", pressed);
    const caption = make("figcaption", {}, swatch(head), `head ${head}`);
    const figure = make("figure", {}, caption, map);
    find("#maps").append(figure);
    maps.push({ figure, canvas, row, column });
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  function pressed(event) {
    const { i, j } = current;
    const step = STEPS[event.key];
    if (step) move(i + step[0], j + step[1]);
    else if (event.key === "Home") move(event.ctrlKey ? 0 : i, 0);
    else if (event.key === "End") move(event.ctrlKey ? queries - 1 : i, keys - 1);
    else return;
    event.preventDefault();
  }

  // ------------------------------------------------------------------ lines

  const box = find("#lines");
  const canvas = box.querySelector("canvas");

  // Calls line(i, j, byte) for the weights of a head that are large enough.
  function eachLine(head, line) {
    for (let i = 0; i < queries; i++) {
      for (let j = 0; j < keys; j++) {
        const byte = at(head, i, j);
        if (byte > 0 && byte >= least) line(i, j, byte);
      }
    }
  }

  function drawLines() {
    const ratio = window.devicePixelRatio || 1;
    const height = Math.min(box.clientHeight, Math.max(queries, keys) * ROW);
    const width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const top = box.scrollTop; // asked once: the browser lays the page out for it
    const y = (index) => (index + 0.5) * ROW - top;
    const inWindow = (i, j) => Math.max(y(i), y(j)) >= 0 && Math.min(y(i), y(j)) <= height;
    let [n, visible] = [0, 0];
    for (const head of shown) {
      eachLine(head, (i, j) => {
        n++;
        visible += inWindow(i, j);
      });
    }
    const many = visible > MOST_LINES;
    [...shown].forEach((head, rank) => {
      const aside = ((rank + 0.5) / shown.size - 0.5) * (ROW - 6); // heads do not cover one another
      context.strokeStyle = color(`head${head % 8}`);
      eachLine(head, (i, j, byte) => {
        const chosen = i === current.i;
        if ((many && !chosen) || !inWindow(i, j)) return;
        const [from, to] = [y(i) + aside, y(j) + aside];
        context.globalAlpha = (chosen ? 1 : 0.25) * clamp(byte / 255, 0.08, 1);
        context.lineWidth = chosen ? 2.5 : 1;
        context.beginPath();
        context.moveTo(0, from);
        context.bezierCurveTo(width / 3, from, (2 * width) / 3, to, width, to);
        context.stroke();
      });
    });
    const query = `query ${place(data.query_tokens, current.i)}`;
    const all = shown.size * queries * keys;
    find("#drawn").textContent = many
      ? `${n} of ${all} weights are as large, too many lines: those of ${query}.`
      : `${n} of ${all} lines drawn, those of ${query} thicker.`;
    canvas.setAttribute("aria-label", find("#drawn").textContent);
  }

  let waiting = false;
  function drawLinesSoon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawLines();
    });
  }

  function addTokens(list, tokens, n, role, chosen) {
    const items = Array.from({ length: n }, (_, index) => {
      const name = named(tokens, index);
      const item = make("li", { textContent: name, title: place(tokens, index) });
      item.dataset.index = index;
      item.id = `${list.id}-${index}`;
      if (role) item.setAttribute("role", role);
      return item;
    });
    list.append(...items);
    for (const kind of ["pointermove", "click"]) {
      list.addEventListener(kind, (event) => {
        if (event.target.dataset.index) chosen(Number(event.target.dataset.index));
      });
    }
    return items;
  }

  // Brings row `index` into the box, which alone scrolls.
  function reveal(index) {
    const top = index * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
  }

  // ------------------------------------------------------------------ the current pair

  let items = null; // of queries and of keys

  function mark(list, index) {
    list.parent.querySelector(".here")?.classList.remove("here");
    list.items[index].classList.add("here");
  }

  function showPair() {
    const { i, j } = current;
    const status = find("#status");
    status.replaceChildren(
      "query ", make("b", { textContent: place(data.query_tokens, i) }),
      " looks at key ", make("b", { textContent: place(data.key_tokens, j) }), ": ",
    );
    for (const head of shown) {
      const value = text(weight(at(head, i, j)));
      status.append(make("span", {}, swatch(head), `head ${head} `, make("b", { textContent: value })));
    }
    for (const { row, column } of maps) {
      Object.assign(row.style, { top: `${(100 * i) / queries}%`, height: `${100 / queries}%` });
      Object.assign(column.style, { left: `${(100 * j) / keys}%`, width: `${100 / keys}%` });
    }
    mark(items.queries, i);
    mark(items.keys, j);
    items.queries.items.forEach((item, index) => {
      if (index === i || item.ariaSelected === "true") item.setAttribute("aria-selected", index === i);
    });
    find("#queries").setAttribute("aria-activedescendant", `queries-${i}`);
  }

  function showRanks() {
    const { i } = current;
    const n = Math.min(RANKED, keys);
    find("#most-title").textContent =
      `Query ${place(data.query_tokens, i)}: the ${n} largest of ${keys} weights`;
    const columns = [...shown].map((head) => {
      const row = Array.from({ length: keys }, (_, j) => [at(head, i, j), j]);
      return { head, best: row.sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, n) };
    });
    const heading = (name, scope) => make("th", { scope }, name);
    const first = make("tr", {}, heading("rank", "col"));
    for (const { head } of columns) {
      const cell = heading(swatch(head), "col");
      cell.append(`head ${head}`);
      first.append(cell);
    }
    const rows = Array.from({ length: n }, (_, rank) => {
      const row = make("tr", {}, heading(String(rank + 1), "row"));
      for (const { best } of columns) {
        const [byte, j] = best[rank];
        row.append(make("td", { textContent: `${text(weight(byte))}  ${place(data.key_tokens, j)}` }));
      }
      return row;
    });
    find("#most").replaceChildren(make("thead", {}, first), make("tbody", {}, ...rows));
  }

  function move(i, j) {
    const before = current.i;
    current.i = clamp(i, 0, queries - 1);
    current.j = clamp(j, 0, keys - 1);
    showPair();
    if (current.i !== before) {
      reveal(current.i);
      showRanks();
      drawLinesSoon();
    }
  }

  function showAll() {
    find("#heads legend").textContent = `${shown.size} of ${heads} heads shown`;
    drawMaps();
    showPair();
    showRanks();
    drawLines();
  }

  // ------------------------------------------------------------------ controls

  function addHeads() {
    const fields = Array.from({ length: heads }, (_, head) => {
      const input = make("input", { type: "checkbox", checked: shown.has(head) });
      input.addEventListener("change", () => {
        if (input.checked) shown.add(head);
        else shown.delete(head);
        const order = [...shown].sort((a, b) => a - b);
        shown.clear();
        for (const h of order) shown.add(h);
        showAll();
      });
      find("#heads").append(make("label", {}, input, swatch(head), String(head)));
      return input;
    });
    const all = make("button", { type: "button", textContent: "all or none" });
    all.addEventListener("click", () => {
      const every = shown.size < heads;
      shown.clear();
      fields.forEach((input, head) => {
        input.checked = every;
        if (every) shown.add(head);
      });
      showAll();
    });
    if (heads > 1) find("#heads").append(all);
  }

  function addLeast() {
    const input = find("#least input");
    input.value = least;
    const show = () => {
      least = Number(input.value);
      const value = text(weight(least));
      find("[data-shows=least]").textContent = value;
      input.setAttribute("aria-valuetext", value);
    };
    input.addEventListener("input", () => {
      show();
      drawLinesSoon();
    });
    show();
  }

  async function start() {
    bytes = await unpack();
    const noun = (n, one, many) => `${n} ${n === 1 ? one : many}`;
    const title = [
      noun(heads, "head", "heads"), noun(queries, "query", "queries"), noun(keys, "key", "keys"),
    ].join(", ");
    find("h1").textContent = document.title = `Attention weights: ${title}`;
    find("[data-shows=largest]").textContent = text(largest);
    find("#precision").textContent =
      `8 bits a weight: values are within ${text(largest / 255)}, small ones closer; ` +
      `those below ${text(weight(0.5))} show as 0. Colours and lines follow the square root of a weight. ` +
      "A pixel of a map that covers several weights shows the largest.";
    addHeads();
    addLeast();
    for (let head = 0; head < heads; head++) addMap(head);
    items = {
      queries: {
        parent: find("#queries"),
        items: addTokens(find("#queries"), data.query_tokens, queries, "option", (i) => move(i, current.j)),
      },
      keys: {
        parent: find("#keys"),
        items: addTokens(find("#keys"), data.key_tokens, keys, null, (j) => move(current.i, j)),
      },
    };
    find("#queries").addEventListener("keydown", pressed);
    box.addEventListener("scroll", drawLinesSoon);
    window.addEventListener("resize", () => {
      drawMaps();
      drawLinesSoon();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
    showAll();
    document.body.dataset.ready = "";
  }

  start();
  return { current, weightAt: (head, i, j) => weight(at(head, i, j)) };
})();
