"use strict";
// Draws what Python has computed: numbers of rows become places on the screen, and nothing else is
// worked out here. Texts are only ever set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("plan").textContent);
  const MOST = 160;        // bands that are drawn one by one; of more, neighbours share a mark
  const inCell = window.parent !== window;  // of a notebook, which has less room
  const TRACK = 30, HEAD = 44, SPAN = inCell ? 140 : 230;
  document.body.classList.toggle("cell", inCell);
  const STATES = ["same", "old", "new"], SIGNS = ["", "− ", "+ "];
  const byId = (id) => document.getElementById(id);

  function make(tag, attributes, ...children) {
    const drawn = ["svg", "g", "path", "rect", "text", "title", "defs", "pattern", "line", "linearGradient", "stop"].includes(tag);
    const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) if (value !== null) made.setAttribute(name, value);
    for (const child of children.flat()) if (child !== null) made.append(child);
    return made;
  }
  const put = (id, ...children) => byId(id).replaceChildren(...children.flat().filter((it) => it !== null));
  const span = (first, last, dash = "–") => first === last ? `${first}` : `${first}${dash}${last}`;
  const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  // Columns of equal numbers come as one number, and those that are another column as its name.
  function unpacked(picture) {
    const columns = picture.columns, read = {};
    for (const [name, given] of Object.entries(columns)) read[name] = typeof given === "number" ? new Array(picture.count).fill(given) : given;
    for (const [name, given] of Object.entries(read)) if (typeof given === "string") read[name] = read[given];
    return read;
  }

  let picture, columns, layer = 0, from = 0, to = 0, current = -1, marks = [], past = [], found = { text: "", next: 0 };

  function colour(index) {
    const at = picture.order ? columns[`${picture.order}_first`][index] : index;
    const place = at / Math.max(picture.order === "token" ? columns.token_first[picture.count - 1] : picture.length - 1, 1);
    return tint(Math.min(Math.max(place, 0), 1), data.ramp);
  }
  function tint(place, ramp) {
    const at = place * (ramp.length - 1), low = Math.floor(at), high = Math.min(low + 1, ramp.length - 1);
    const mixed = ramp[low].map((it, i) => Math.round(it + (ramp[high][i] - it) * (at - low)));
    return `rgb(${mixed.join(" ")})`;
  }
  const paint = (index) => data.compared ? `var(--${STATES[columns.state[index]]})` : colour(index);

  // ---- where rows are on the screen ----------------------------------------------------------
  function axis(name, width, indices) {
    const joined = columns[`${name}_at`], extents = [];
    const first = joined || columns[`${name}_first`], last = joined || columns[`${name}_last`];
    const spans = indices.map((i) => [first[i], last[i]]).sort((a, b) => a[0] - b[0]);
    for (const [low, high] of spans) {
      const before = extents[extents.length - 1];
      if (before && low <= before.last + 1) before.last = Math.max(before.last, high);
      else extents.push({ first: low, last: high });
    }
    const rows = extents.reduce((sum, it) => sum + it.last - it.first + 1, 0);
    const used = Math.min(width, Math.max(rows * 104 + (extents.length - 1) * 18, 360));
    const gap = extents.length > 1 ? Math.min(18, 0.35 * used / (extents.length - 1)) : 0;
    const size = (used - gap * (extents.length - 1)) / rows;
    let x = (width - used) / 2;
    for (const it of extents) { it.x = x; it.end = x + (it.last - it.first + 1) * size; x = it.end + gap; }
    const starts = extents.map((it) => it.first);
    const at = (row) => {
      let low = 0, high = starts.length - 1;
      while (low < high) { const middle = (low + high + 1) >> 1; if (starts[middle] <= row) low = middle; else high = middle - 1; }
      return extents[low].x + (row - extents[low].first) * size;
    };
    const parts = picture.parts[name === "src" ? 0 : 1];
    const begin = columns[`${name}_from`], end = columns[`${name}_to`];
    // Bands from, or to, the very same place stand side by side in it.
    const shared = new Map();
    const key = (i) => `${first[i]} ${last[i]} ${begin[i]} ${end[i]} ${columns.state[i]}`;
    for (const i of indices) { const k = key(i); if (shared.has(k)) shared.get(k).push(i); else shared.set(k, [i]); }
    const place = (i) => {
      const a = at(first[i]) + begin[i] / parts * size, b = at(last[i]) + end[i] / parts * size, of = shared.get(key(i));
      if (of.length === 1) return [a, b];
      const number = of.indexOf(i), width = (b - a) / of.length;
      return [a + number * width, a + (number + 1) * width];
    };
    return { extents, size, gap, at, place };
  }

  function ribbon([a, b], [c, d], top, bottom, least) {
    if (b - a < least) { const more = (least - b + a) / 2; a -= more; b += more; }
    if (d - c < least) { const more = (least - d + c) / 2; c -= more; d += more; }
    const middle = (top + bottom) / 2, n = (x) => Math.round(x * 10) / 10;
    return `M${n(a)} ${top}C${n(a)} ${middle} ${n(c)} ${middle} ${n(c)} ${bottom}H${n(d)}C${n(d)} ${middle} ${n(b)} ${middle} ${n(b)} ${top}Z`;
  }

  // ---- the picture ---------------------------------------------------------------------------
  // Bands in view, or, where they are too many, several neighbours (of one state) together.
  function chunks() {
    const size = Math.max(1, Math.ceil((to - from) / MOST)), made = [];
    for (let i = from; i < to; i += size) {
      const states = [[], [], []];
      for (let j = i; j < Math.min(i + size, to); j++) states[columns.state[j]].push(j);
      made.push(...states.filter((it) => it.length));
    }
    return made;
  }

  function draw() {
    const box = byId("picture"), width = Math.max(box.clientWidth, 280);
    const inView = [];
    for (let i = from; i < to; i++) inView.push(i);
    const src = axis("src", width, inView), dst = axis("dst", width, inView);
    const track = data.compared ? 40 : TRACK, top = HEAD + track, bottom = top + SPAN, height = bottom + track + HEAD;
    const root = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": `${to - from} of ${picture.count} runs from source to destination. Arrow keys go from one to the next.` });
    root.append(pattern());
    beds(root, src, HEAD, track); beds(root, dst, bottom, track);
    const layers = [[], [], []], labels = [];
    marks = chunks().map((indices) => {
      const state = columns.state[indices[0]], single = indices.length === 1, fill = paint(indices[indices.length >> 1]);
      const least = single || state ? 2 : 0.7;
      let path = "";
      for (const i of indices) path += ribbon(src.place(i), dst.place(i), top, bottom, least);
      const g = make("g", { class: `band ${data.compared ? STATES[state] : ""} ${single ? "" : "many"}`, tabindex: "-1", role: "img", "aria-label": sentence(indices) });
      const ends = make("path", { class: "ends", fill: data.compared && state === 1 ? "url(#hatch)" : fill, stroke: data.compared && state === 1 ? fill : "none", d: "" });
      const lane = data.compared && state ? track / 2 : track;
      const tops = [HEAD + (state === 2 && data.compared ? track / 2 : 0), bottom + (state === 1 && data.compared ? track / 2 : 0)];
      let boxes = "";
      const texts = [];
      for (const i of indices) [src, dst].forEach((side, which) => {
        const [a, b] = side.place(i), w = Math.max(b - a, least), left = (a + b - w) / 2;
        boxes += `M${left.toFixed(1)} ${tops[which]}h${w.toFixed(1)}v${lane}h${-w.toFixed(1)}Z`;
        const said = `${data.compared ? SIGNS[state] : ""}${placeLabel(i)}`;
        if (single && said.trim() && w > said.length * 7 + 4) {
          texts.push(make("text", { class: "end", x: (a + b) / 2, y: tops[which] + lane / 2 + 4, "text-anchor": "middle", style: data.compared ? `fill:${state === 1 ? "var(--ink)" : "var(--card)"};stroke:${state === 1 ? "var(--card)" : fill}` : `stroke:${fill}` }, said));
        }
      });
      ends.setAttribute("d", boxes);
      g.append(make("path", { class: "ribbon", d: path, fill: data.compared && state === 1 ? "url(#hatch)" : fill, stroke: fill }), ends);
      labels.push(...texts);
      layers[state].push(g);
      return { g, indices, texts };
    });
    marks.forEach((mark, number) => {
      mark.g.addEventListener("pointerenter", () => show(number));
      mark.g.addEventListener("pointerleave", () => show(-1));
      mark.g.addEventListener("focus", () => { current = number; show(number); });
      mark.g.addEventListener("blur", () => show(-1));
      mark.g.addEventListener("click", () => { mark.g.focus(); closer(number); });
    });
    root.append(...layers[0], ...layers[1], ...layers[2]);
    ticks(root, src, HEAD, track); ticks(root, dst, bottom, track);
    root.append(...labels);
    numbers(root, src, HEAD - 7, width); numbers(root, dst, bottom + track + 16, width);
    root.append(make("text", { class: "title", x: 0, y: 13 }, `${picture.sides[0].title} ${picture.sides[0].row}s`));
    root.append(make("text", { class: "title", x: 0, y: height - 4 }, `${picture.sides[1].title} ${picture.sides[1].row}s`));
    put("picture", root);
    if (marks.length) marks[Math.min(Math.max(current, 0), marks.length - 1)].g.setAttribute("tabindex", "0");
    strip(); show(-1);
  }

  const pattern = () => make("defs", {}, make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, make("rect", { width: 6, height: 6, fill: "var(--old)", opacity: 0.2 }), make("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--old)", "stroke-width": 3, opacity: 0.75 })));
  function placeLabel(i) {
    if (!picture.order) return picture.count > 1 ? `${i}` : "";
    return picture[`${picture.order}_texts`][i] || span(columns[`${picture.order}_first`][i], columns[`${picture.order}_last`][i]);
  }
  function beds(root, side, y, track) {
    root.append(make("path", { class: "bed", d: side.extents.map((it) => `M${it.x.toFixed(1)} ${y}H${it.end.toFixed(1)}V${y + track}H${it.x.toFixed(1)}Z`).join("") }));
    if (side.gap >= 12) for (let i = 1; i < side.extents.length; i++)
      root.append(make("text", { x: side.extents[i].x - side.gap / 2, y: y + track / 2 + 3, "text-anchor": "middle", "aria-hidden": "true" }, "⋯"));
  }
  function ticks(root, side, y, track) {
    if (side.size < 5) return;
    let d = "";
    for (const it of side.extents) for (let row = it.first + 1; row <= it.last; row++) d += `M${side.at(row).toFixed(1)} ${y}v${track}`;
    root.append(make("path", { class: "tick", d }));
  }
  function numbers(root, side, y, width) {
    let free = -Infinity;
    const say = (x, text) => {
      const half = text.length * 3.6 + 3, left = Math.min(Math.max(x, half), width - half);
      if (left - half < free) return;
      free = left + half;
      root.append(make("text", { x: left, y, "text-anchor": "middle" }, text));
    };
    for (const it of side.extents) {
      if (side.size >= 30) for (let row = it.first; row <= it.last; row++) say(side.at(row) + side.size / 2, `${row}`);
      else say((it.x + it.end) / 2, span(it.first, it.last));
    }
  }

  // ---- words ---------------------------------------------------------------------------------
  const least = (name, of) => of.reduce((low, i) => Math.min(low, columns[name][i]), Infinity);
  const most = (name, of) => of.reduce((high, i) => Math.max(high, columns[name][i]), -Infinity);

  function facts(of) {
    const i = of[0], [src, dst] = picture.sides, said = [];
    const sign = data.compared ? ["in both plans: ", "only in the old plan: ", "only in the new plan: "][columns.state[i]] : "";
    const rows = (side, name) => `${side.row}${least(`${name}_first`, of) === most(`${name}_last`, of) ? "" : "s"} ${span(least(`${name}_first`, of), most(`${name}_last`, of), of.length > 1 || picture.joined ? " to " : "–")}`;
    const joined = of.length === 1 && picture.joined;
    const title = joined ? `${sign}neighbours in the request's order, from ${rows(src, "src")} → ${rows(dst, "dst")}` : of.length === 1 ? `${sign}${rows(src, "src")} → ${rows(dst, "dst")}` : `${sign}${many(of.length, "run")}, from ${rows(src, "src")} → ${rows(dst, "dst")}`;
    const words = picture.layers[layer] || ["", ""];
    said.push(["Layer", [words[0], words[1]].filter(Boolean).join(", ")]);
    const kv = ["", "K", "V", "K+V"][columns.kv[i]], head = span(least("head_first", of), most("head_last", of), "..");
    const holds = [kv, columns.head_first[i] < 0 ? "" : `head${head.includes("..") ? "s" : ""} ${head}`].filter(Boolean).join(" ");
    if (holds) said.push(["Holds", holds]);
    const ranged = (word, name, texts) => {
      if (columns[`${name}_first`][i] < 0) return "";
      const text = of.length === 1 && texts[i] ? texts[i] : span(least(`${name}_first`, of), most(`${name}_last`, of), "..");
      return `${word}${/\D/.test(text) ? "s" : ""} ${text}`;
    };
    const tokens = ranged("token", "token", picture.token_texts), entries = ranged("entry", "entry", picture.entry_texts).replace("entrys", "entries");
    if (tokens) said.push(["Request", tokens]);
    if (entries) said.push(["Block table", `${entries} of ${picture.entries.toLocaleString("en")}`]);
    if (of.length === 1) said.push(["Bytes", picture.amounts[columns.amount[i]]]);
    else said.push(["Closer", "Enter, or a click, shows these alone"]);
    return [title, said];
  }
  function sentence(of) {
    const [title, said] = facts(of);
    return `${title}. ${said.map(([word, text]) => word === "Layer" || word === "Request" || word === "Holds" || word === "Bytes" ? text : `${word}: ${text}`).join("; ")}.`;
  }
  function show(number) {
    const box = byId("picture");
    if (number < 0) {  // the pointer has gone: what has the focus is said again
      const focused = marks.findIndex((it) => it.g === document.activeElement);
      if (focused >= 0) number = focused;
    }
    for (const it of box.querySelectorAll(".on")) it.classList.remove("on");
    box.classList.toggle("active", number >= 0);
    if (number < 0) {
      put("detail", make("p", { class: "hint" }, `Point at a band to read what it moves, or press Tab and then the arrow keys.${picture.count > MOST ? " A click, or Enter, looks closer; Escape goes back." : ""}`));
      return;
    }
    for (const it of [marks[number].g, ...marks[number].texts]) it.classList.add("on");
    const [title, said] = facts(marks[number].indices);
    put("detail", make("h3", {}, title), make("dl", {}, said.map(([word, text]) => make("div", {}, make("dt", {}, word), make("dd", {}, text)))));
  }

  // ---- moving around -------------------------------------------------------------------------
  function view(first, last, remember = true) {
    const size = Math.min(Math.max(Math.round(last - first), 1), picture.count);
    first = Math.min(Math.max(Math.round(first), 0), picture.count - size);
    if (remember && (first !== from || first + size !== to)) past.push([from, to]);
    from = first; to = first + size;
    draw();
  }
  function closer(number) {
    const of = marks[number].indices;
    if (of.length === 1) return;
    current = 0;
    view(of[0], of[of.length - 1] + 1);
    marks[0].g.focus();
  }
  function back() {
    if (!past.length) return;
    const [first, last] = past.pop(), band = marks.length ? marks[Math.max(current, 0)].indices[0] : 0;
    view(first, last, false);
    focusOn(band);
  }
  function focusOn(band) {
    const number = marks.findIndex((it) => it.indices.includes(band));
    if (number >= 0) { current = number; marks[number].g.focus(); }
  }
  function zoom(factor) {
    const middle = (from + to) / 2, half = Math.max((to - from) * factor / 2, 0.5);
    view(middle - half, middle + half);
  }
  function step(by) {
    const next = current + by;
    if (next >= 0 && next < marks.length) { marks[next].g.focus(); return; }
    const size = to - from;
    if (by > 0 ? to >= picture.count : from <= 0) return;
    const first = by > 0 ? Math.min(from + size, picture.count - size) : Math.max(from - size, 0);
    const band = by > 0 ? to : from - 1;
    view(first, first + size, false); focusOn(band);
  }
  byId("picture").addEventListener("keydown", (event) => {
    const keys = { ArrowRight: () => step(1), ArrowDown: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => step(-1), Home: () => marks[0].g.focus(), End: () => marks[marks.length - 1].g.focus(), Enter: () => closer(current), Escape: back, "+": () => zoom(0.5), "-": () => zoom(2) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); keys[event.key]();
  });

  // The whole request as a strip, of which a part is shown.
  function strip() {
    const box = byId("strip");
    box.hidden = picture.count <= 24;
    if (box.hidden) return;
    const width = Math.max(byId("picture").clientWidth, 280), height = 22, x = (i) => i / picture.count * width;
    const root = make("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "slider", "aria-label": "Part of the request that is shown: arrows move it, plus and minus change its size", "aria-valuemin": 0, "aria-valuemax": picture.count, "aria-valuenow": from, "aria-valuetext": `runs ${from} to ${to - 1} of ${picture.count}` });
    if (data.compared) {
      const paths = ["", "", ""];
      for (let i = 0; i < picture.count; i++) paths[columns.state[i]] += `M${x(i).toFixed(2)} ${[7, 1, 11][columns.state[i]]}h${Math.max(width / picture.count, 1.2).toFixed(2)}v${[8, 10, 10][columns.state[i]]}h${-Math.max(width / picture.count, 1.2).toFixed(2)}Z`;
      paths.forEach((d, state) => root.append(make("path", { d, fill: `var(--${STATES[state]})`, opacity: state ? 1 : 0.35 })));
    } else {
      root.append(make("defs", {}, make("linearGradient", { id: "ramp" }, data.ramp.map((it, i) => make("stop", { offset: i / (data.ramp.length - 1), "stop-color": `rgb(${it.join(" ")})` })))));
      root.append(make("rect", { width, height, fill: "url(#ramp)", rx: 4 }));
    }
    const left = x(from), right = Math.max(x(to), left + 4);
    root.append(make("rect", { class: "shade", width: left, height }), make("rect", { class: "shade", x: right, width: Math.max(width - right, 0), height }), make("rect", { class: "window", x: left + 1, y: 1, width: Math.max(right - left - 2, 2), height: height - 2, rx: 3 }));
    const at = (event) => { const edge = root.getBoundingClientRect(); return (event.clientX - edge.left) / edge.width * picture.count; };
    root.addEventListener("pointerdown", (event) => {
      const begin = at(event);
      root.setPointerCapture(event.pointerId);
      root.addEventListener("pointerup", (end) => {
        const stop = at(end), size = Math.min(to - from, Math.max(MOST, 1));
        if (Math.abs(stop - begin) < picture.count / width * 4) view(begin - size / 2, begin + size / 2);
        else view(Math.min(begin, stop), Math.max(begin, stop));
      }, { once: true });
    });
    root.addEventListener("keydown", (event) => {
      const by = Math.max(1, Math.round((to - from) / 4)), size = to - from;
      const keys = { ArrowRight: () => view(from + by, to + by), ArrowUp: () => view(from + by, to + by), ArrowLeft: () => view(from - by, to - by), ArrowDown: () => view(from - by, to - by), Home: () => view(0, size), End: () => view(picture.count - size, picture.count), "+": () => zoom(0.5), "-": () => zoom(2), Escape: back };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault(); keys[event.key](); byId("strip").querySelector("svg").focus();
    });
    const button = (id, text, label, act, off) => {
      const made = make("button", { type: "button", id, "aria-label": label, title: label, disabled: off ? "" : null }, text);
      made.addEventListener("click", () => { act(); if (act !== nextChange) byId(id).focus(); });
      return made;
    };
    // Where there are too many, those in a band were joined before.
    const each = picture.joined / picture.count || 1;
    const shown = to - from === picture.count ? `all ${many(picture.joined || picture.count, "run")}` : `${picture.joined ? "parts" : "runs"} ${from.toLocaleString("en")} to ${(to - 1).toLocaleString("en")} of ${picture.count.toLocaleString("en")}`;
    const together = to - from > MOST || picture.joined ? `, ${Math.ceil(Math.ceil((to - from) / MOST) * each)} neighbours to a mark` : "";
    put("strip", root, make("div", { class: "said" }, button("in", "+", "Look closer", () => zoom(0.5), to - from <= 1), button("out", "−", "Look from further away", () => zoom(2), to - from === picture.count), button("all", "All", "Show the whole request", () => view(0, picture.count), to - from === picture.count), data.compared ? button("change", "Next change", "Go to the next run that only one of the plans has", nextChange, !columns.state.some((it) => it)) : null, make("span", { id: "shown" }, `In the request's order, ${shown}${together}. Drag over the strip to choose a part.`)));
  }

  function nextChange() {
    const start = marks.length ? marks[Math.max(current, 0)].indices : [0], of = [];
    for (let i = 0; i < picture.count; i++) if (columns.state[i]) of.push(i);
    const band = of.find((it) => it > start[start.length - 1]) ?? of[0], wide = Math.min(24, picture.count);
    if (band === undefined) return;
    if (to - from > MOST || band < from || band >= to) view(band - wide / 2, band + wide / 2);
    focusOn(band);
  }
  function search(text) {
    const wanted = Number(text.trim()), of = [];
    if (text.trim() === "" || !Number.isInteger(wanted)) { put("answer", "A block is a number."); return; }
    for (const [which, name] of [[0, "src"], [1, "dst"]])
      for (let i = 0; i < picture.count; i++)
        if (columns[`${name}_first`][i] <= wanted && wanted <= columns[`${name}_last`][i]) of.push([which, i]);
    if (picture.joined) { put("answer", `${many(picture.joined, "run")} were joined to be drawn: none says which ${picture.sides[0].row}s it has. In Python, plan.tables does.`); return; }
    if (!of.length) { put("answer", `No ${picture.sides[0].row} ${wanted} at the source, and no ${picture.sides[1].row} ${wanted} at the destination, is in this plan.`); return; }
    found = found.text === text ? { text, next: (found.next + 1) % of.length } : { text, next: 0 };
    const [which, band] = of[found.next], wide = Math.min(24, picture.count);
    if (to - from > MOST || band < from || band >= to) view(band - wide / 2, band + wide / 2);
    focusOn(band);
    put("answer", `${picture.sides[which].title} ${picture.sides[which].row} ${wanted}${of.length > 1 ? `, ${found.next + 1} of ${of.length}: press Find for the next` : ""}.`);
  }
  byId("search").addEventListener("click", () => search(byId("block").value));  // no form: a notebook's frame has none
  byId("block").addEventListener("keydown", (event) => { if (event.key === "Enter") search(byId("block").value); });

  // ---- what stands around --------------------------------------------------------------------
  function card(side) {
    const versions = side.versions.map(([mark, type, sameType, axes, about]) => make("div", {},
      make("div", { class: "axes" }, mark ? make("span", { class: "mark", style: `color:var(--${mark})` }, `${mark === "old" ? "−" : "+"} ${mark}`) : null, make("span", { class: sameType ? "type" : "type axis odd" }, sameType ? type : `≠ ${type}`),
        axes.map(([name, length, shared]) => make("span", { class: shared ? "axis" : "axis odd", title: shared ? null : "Not the same at the other side" }, shared ? "" : "≠ ", name ? `${name} ${length}` : `${length}`))),
      make("p", { class: "facts" }, about.join(" · "))));
    return make("div", { class: "card side" }, make("h2", {}, make("b", {}, side.title), ` ${side.owner}${side.name ? `: ${side.name}` : ""}`), versions);
  }
  function setLayer(number) {
    layer = number;
    const [first, second] = picture.layers[layer];
    put("layer-text", first); put("tensors", second);
    byId("layer").setAttribute("aria-valuetext", `${first}, ${second}`);
    for (const it of marks) it.g.setAttribute("aria-label", sentence(it.indices));
    show(-1);
  }
  function legend() {
    const swatch = (state) => make("svg", { width: 34, height: 14, "aria-hidden": "true" }, make("g", { class: `band ${STATES[state]}` }, make("rect", { class: "ribbon", x: 1, y: 2, width: 32, height: 10, fill: state === 1 ? "url(#hatch)" : `var(--${STATES[state]})`, stroke: `var(--${STATES[state]})` })));
    if (data.compared) return [make("span", {}, swatch(1), "− only in the old plan (dashed, hatched)"), make("span", {}, swatch(2), "+ only in the new plan (solid)"), make("span", {}, swatch(0), "in both")];
    if (picture.count === 1) return [];
    const ramp = make("svg", { width: 90, height: 10, "aria-hidden": "true" }, data.ramp.map((it, i) => make("rect", { x: i * 90 / data.ramp.length, width: 90 / data.ramp.length + 0.5, height: 10, fill: `rgb(${it.join(" ")})` })));
    return [make("span", {}, ramp, `colour, and the number in a box: ${picture.order === "entry" ? "entry of the request’s block table" : picture.order === "token" ? "tokens of the request" : "order"}, first to last`), make("span", {}, `wide band: neighbouring ${picture.sides[1].row}s that move as one run`)];
  }
  function histogram() {
    const rows = picture.sizes.map(([label, counts, shares]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { "aria-hidden": "true" }, shares.map((it, i) => make("i", { class: shares.length > 1 ? STATES[i + 1] : "", style: `width:${it * 100}%` }))), make("td", {}, counts.join(" → "))));
    return make("table", { "aria-label": "Descriptors by size" }, make("tbody", {}, rows));
  }

  function open(number) {
    picture = data.pictures[number]; columns = unpacked(picture);
    from = 0; to = picture.count; current = 0; past = []; found = { text: "", next: 0 }; layer = 0; marks = [];
    for (const [i, tab] of [...byId("tabs").children].entries()) { tab.setAttribute("aria-selected", i === number); tab.tabIndex = i === number ? 0 : -1; }
    if (data.pictures.length > 1) put("group", make("p", {}, make("b", {}, picture.summary), picture.verdict ? ` ${picture.verdict}` : ""));
    put("sides", card(picture.sides[0]), make("div", { class: "arrow", "aria-hidden": "true" }, "→"), card(picture.sides[1]));
    const slider = byId("layer");
    slider.max = picture.layers.length - 1; slider.value = 0;
    slider.hidden = picture.layers.length < 2;
    put("alike", picture.alike);
    put("notes", make("h2", {}, "What stands out"), picture.notes.length ? make("ul", {}, picture.notes.map((it) => make("li", {}, it))) : make("p", { class: "none" }, "Nothing."));
    put("sizes", make("h2", {}, "Descriptors by size"), histogram());
    put("legend", legend()); put("answer", "");
    draw(); setLayer(0);
  }

  put("tabs", data.pictures.length > 1 ? data.pictures.map((it, number) => {
    const tab = make("button", { type: "button", role: "tab" }, it.name);
    tab.addEventListener("click", () => open(number));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = (number + by + data.pictures.length) % data.pictures.length;
      open(next); byId("tabs").children[next].focus();
    });
    return tab;
  }) : []);
  byId("tabs").hidden = data.pictures.length < 2;
  byId("layer").addEventListener("input", (event) => setLayer(Number(event.target.value)));
  open(0);
  let width = byId("picture").clientWidth;
  new ResizeObserver(() => {
    if (byId("picture").clientWidth === width) return;
    width = byId("picture").clientWidth;
    const focused = byId("picture").contains(document.activeElement) ? marks[current].indices[0] : -1;
    draw();
    if (focused >= 0) focusOn(focused);
  }).observe(byId("picture"));
})();
