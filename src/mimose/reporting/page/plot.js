"use strict";

// Formatting, elements and plots with axes, for page.js

const NS = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const colour = (name) => `var(--${name})`;

// Formatting

function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(n) >= unit - unit / 2048) return (n / unit).toFixed(Math.abs(n) < 100 * unit ? 2 : 0) + " " + name;
  }
  return Math.round(n) + " B";
}
function seconds(s) {
  if (s >= 7200) return (s / 3600).toFixed(1) + " h";
  if (s >= 120) return (s / 60).toFixed(1) + " min";
  if (s >= 1) return s.toFixed(2) + " s";
  return (s * 1e3).toFixed(s < 0.01 ? 2 : 1) + " ms";
}
const percent = (share, digits = 0) => (100 * share).toFixed(digits) + "%";
const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const count = (text, letter) => text.split(letter).length - 1;

// Elements: text is always inserted as text, never as markup

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, tone, kind = ""]) => {
    const mark = make("i", { class: kind });
    mark.style.background = colour(tone);
    mark.style.color = colour(tone);
    return make("span", {}, mark, name);
  }));
}

const tip = byId("tip");
function showTip(event, lines) {
  tip.textContent = lines.filter(Boolean).join("\n");
  tip.hidden = false;
  const wide = tip.offsetWidth, right = window.scrollX + document.documentElement.clientWidth;
  let x = event.pageX + 14;
  if (x + wide > right - 8) x = event.pageX - wide - 14;
  tip.style.left = Math.max(8, x) + "px";
  tip.style.top = event.pageY + 14 + "px";
}
const hideTip = () => { tip.hidden = true; };

// A plot with axes

function ticks(low, high, about, binary) {
  const span = high - low || 1;
  let step;
  if (binary) {
    const unit = span >= 2 ** 30 ? 2 ** 30 : span >= 2 ** 20 ? 2 ** 20 : 2 ** 10;
    step = nice(span / unit / about) * unit;
  } else step = nice(span / about);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}
function nice(raw) {
  const power = 10 ** Math.floor(Math.log10(raw)), lead = raw / power;
  return (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10) * power;
}
function tickBytes(n) {
  if (n === 0) return "0";
  const unit = n >= 2 ** 30 ? [2 ** 30, "GiB"] : n >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return +(n / unit[0]).toFixed(2) + " " + unit[1];
}

class Plot {
  constructor(id, { height = 260, x, y, xLabel, xTick = String, left = 66, bottom = 40, label }) {
    const place = byId(id), width = Math.max(320, place.clientWidth);
    this.box = { left, top: 12, right: width - 12, bottom: height - bottom };
    this.xRange = x[0] === x[1] ? [x[0] - 1, x[1] + 1] : x;
    this.yRange = y;
    this.root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    place.replaceChildren(this.root);
    this.axes(xLabel, xTick, height);
  }
  x(value) {
    const [low, high] = this.xRange;
    return this.box.left + ((value - low) / (high - low)) * (this.box.right - this.box.left);
  }
  y(value) {
    const [low, high] = this.yRange;
    return this.box.bottom - ((value - low) / (high - low)) * (this.box.bottom - this.box.top);
  }
  axes(xLabel, xTick, height) {
    const { left, right, bottom } = this.box;
    for (const at of ticks(...this.yRange, 5, true)) {
      const y = this.y(at);
      this.add("line", { class: "grid", x1: left, x2: right, y1: y, y2: y });
      this.add("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, tickBytes(at));
    }
    for (const at of ticks(...this.xRange, Math.max(4, (right - left) / 80))) {
      this.add("text", { x: this.x(at), y: bottom + 17, "text-anchor": "middle" }, xTick(at));
    }
    if (xLabel) this.add("text", { x: right, y: height - 5, "text-anchor": "end" }, xLabel);
  }
  add(tag, attributes, text) {
    return this.root.appendChild(svg(tag, attributes, text));
  }
  level(value, kind, text, atLeft = false) {
    if (value < this.yRange[0] || value > this.yRange[1]) return;
    const y = this.y(value);
    this.add("line", { class: kind, x1: this.box.left, x2: this.box.right, y1: y, y2: y });
    if (text) {
      const [x, anchor] = atLeft ? [this.box.left + 4, "start"] : [this.box.right, "end"];
      this.add("text", { x, y: y - 5, "text-anchor": anchor, style: `fill:${colour("budget")}` }, text);
    }
  }
  dots(points, tone, size = 5, kind = "") {
    const path = points.map(([x, y]) => `M${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}h0`).join("");
    this.add("path", { d: path, class: kind, style: `stroke:${colour(tone)};stroke-width:${size};stroke-linecap:round;fill:none` });
  }
  dashes(points, tone) {
    const path = points.map(([x, y]) => `M${(this.x(x) - 4).toFixed(1)} ${this.y(y).toFixed(1)}h8`).join("");
    this.add("path", { d: path, style: `stroke:${colour(tone)};stroke-width:1.5;fill:none` });
  }
  line(points, tone, extra = "") {
    const path = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    this.add("path", { d: path, style: `stroke:${colour(tone)};stroke-width:2;stroke-linejoin:round;fill:none;${extra}` });
  }
  area(points, tone) {
    const floor = this.y(this.yRange[0]).toFixed(1);
    const path = points.map(([x, y]) => `L${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    const start = this.x(points[0][0]).toFixed(1), end = this.x(points[points.length - 1][0]).toFixed(1);
    this.add("path", { d: `M${start} ${floor}${path}L${end} ${floor}Z`, style: `fill:${colour(tone)};opacity:.13` });
  }
  // An empty box; of a narrow one only the upper and lower edge, as its sides would fill it
  frame(x, y, width, height, tone) {
    const style = `stroke:${colour(tone)};stroke-width:1.2;fill:none`;
    if (width < 5) this.add("path", { d: `M${x} ${y + 0.6}h${width}m0 ${height - 1.2}h${-width}`, class: "work hollow", style });
    else this.add("rect", { x: x + 0.6, y: y + 0.6, width: width - 1.2, height: height - 1.2, rx: 1.5, class: "work hollow", style });
  }
  onHover(move, leave = () => {}, click = () => {}) {
    const cursor = this.add("line", { class: "cursor", y1: this.box.top, y2: this.box.bottom, visibility: "hidden" });
    const valueAt = (event) => {
      const area = this.root.getBoundingClientRect(), [low, high] = this.xRange;
      const inside = ((event.clientX - area.left) / area.width) * this.root.viewBox.baseVal.width;
      return low + ((inside - this.box.left) / (this.box.right - this.box.left)) * (high - low);
    };
    this.root.addEventListener("pointermove", (event) => {
      const at = move(valueAt(event), event);
      if (at === undefined) return;
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, this.x(at));
      cursor.setAttribute("visibility", "visible");
    });
    this.root.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      hideTip();
      leave();
    });
    this.root.addEventListener("click", (event) => click(valueAt(event)));
  }
}
const nearest = (values, at) => {
  let best = -1;
  values.forEach((value, i) => {
    if (value !== null && (best < 0 || Math.abs(value - at) < Math.abs(values[best] - at))) best = i;
  });
  return best;
};
