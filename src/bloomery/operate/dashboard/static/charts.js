// Charts: each is a uPlot with the curves of the chosen runs, the events drawn on it, and words for screen readers.
"use strict";
var bloomery = window.bloomery || {};
window.bloomery = bloomery;

(function () {
  const PALETTES = {
    light: ["#0072b2", "#d55e00", "#007a5a", "#b5508f", "#8a6d00", "#3b7fb6", "#444444"],
    dark: ["#56b4e9", "#f0834a", "#2fc79a", "#e29ac6", "#f0e442", "#9ad0f5", "#dddddd"],
  };
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 2]];

  bloomery.colour = function (place) {
    const palette = PALETTES[bloomery.isDark() ? "dark" : "light"];
    return palette[place % palette.length];
  };

  bloomery.isDark = function () {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  };

  bloomery.number = function (value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return Number(value.toPrecision(4)).toExponential();
    if (size >= 1e12) return (value / 1e12).toPrecision(4) + " T";
    if (size >= 1e9) return (value / 1e9).toPrecision(4) + " G";
    if (size >= 1e6) return (value / 1e6).toPrecision(4) + " M";
    if (size >= 1e4 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  };

  // The labels of an axis, with as many digits as tell neighbours apart.
  bloomery.ticks = function (splits, step) {
    const size = Math.max(...splits.map(Math.abs));
    if (size < 1e-3 || size >= 1e15) return splits.map(bloomery.number);
    const [unit, sign] = [[1e12, " T"], [1e9, " G"], [1e6, " M"]].find(([least]) => size >= least) || [1, ""];
    let digits = 0;
    for (let own = step / unit; digits < 9 && Math.abs(own - Math.round(own)) > 1e-6 * own; own *= 10) digits += 1;
    return splits.map((value) => (value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + sign);
  };

  bloomery.when = function (seconds) {
    if (!Number.isFinite(seconds)) return "–";
    const date = new Date(seconds * 1000);
    const pad = (number) => String(number).padStart(2, "0");
    return date.getFullYear() + "-" + pad(date.getMonth() + 1) + "-" + pad(date.getDate()) + " " +
      pad(date.getHours()) + ":" + pad(date.getMinutes()) + ":" + pad(date.getSeconds());
  };

  // One chart. spec: {title, unit, names, smooth, discarded, log}; owner: the page, which knows range and events.
  bloomery.Chart = class {
    constructor(spec, owner) {
      this.spec = spec;
      this.owner = owner;
      this.element = bloomery.el("figure", {
        class: "chart", tabindex: "0", role: "group", "aria-label": spec.title, id: "chart-" + spec.id,
      });
      this.title = bloomery.el("h3", {}, spec.title + (spec.unit ? " (" + spec.unit + ")" : ""));
      this.words = bloomery.el("p", { class: "soft" });
      this.canvas = bloomery.el("div", {});
      this.note = bloomery.el("p", { class: "note" });
      this.element.append(this.title, this.words, this.canvas, this.note);
      this.element.style.margin = "0";
      this.element.addEventListener("keydown", (event) => this.key(event));
      this.plot = null;
      this.shape = "";
      this.frames = 0;
      this.isSeen = true;
      new IntersectionObserver((entries) => { // what nobody sees is not drawn while a range moves
        this.isSeen = entries[entries.length - 1].isIntersecting;
        if (this.isSeen && this.plot && !this.element.hidden) this.scale();
      }).observe(this.element);
      new ResizeObserver(() => this.resize()).observe(this.element);
    }

    key(event) {
      const moves = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", "0": "all", Home: "all", End: "recent" };
      if (moves[event.key] && !event.ctrlKey && !event.metaKey && event.target === this.element) {
        event.preventDefault();
        this.owner.move(moves[event.key]);
      }
    }

    // curves: [{label, colour, width, dash, x, y}], in the order in which they are drawn.
    draw(curves) {
      this.element.hidden = curves.length === 0;
      if (!curves.length) return;
      const shape = JSON.stringify([curves.map((c) => [c.label, c.colour, c.width, c.dash]), this.owner.axis, this.owner.isLog(this.spec), bloomery.isDark()]);
      const data = uPlot.join(curves.map((c) => [c.x, c.y]));
      this.ceiling = this.spec.spent ? 5 * Math.max(...curves.map((c) => middle(c.y))) : Infinity;
      if (shape !== this.shape || !this.plot) this.build(curves, data, shape);
      else {
        this.plot.setData(data, false);
        this.scale();
      }
      this.words.textContent = this.summary(curves);
    }

    build(curves, data, shape) {
      if (this.plot) this.plot.destroy();
      this.shape = shape;
      const style = getComputedStyle(document.documentElement);
      const ink = style.getPropertyValue("--soft").trim(), grid = style.getPropertyValue("--grid").trim();
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
      const isTime = this.owner.axis === "time", isLog = this.owner.isLog(this.spec);
      const shown = (self, value) => bloomery.number(value);
      this.plot = new uPlot({
        width: this.width(), height: 260,
        scales: {
          x: { time: isTime, auto: false, range: () => this.owner.range() },
          y: isLog ? { distr: 3 } : { range: (self, low, high) => this.limits(low, high) },
        },
        axes: [
          { ...axis, values: isTime ? undefined : (self, splits, place, space, step) => bloomery.ticks(splits, step) },
          { ...axis, size: 72, values: (self, splits, place, space, step) => (isLog ? splits.map((v) => (v === null ? "" : bloomery.number(v))) : bloomery.ticks(splits, step)) },
        ],
        series: [
          { label: this.owner.axisLabel(), value: (self, v) => (v === null ? "–" : isTime ? bloomery.when(v) : bloomery.number(v)) },
          ...curves.map((c) => ({ label: c.label, stroke: c.colour, width: c.width, dash: c.dash, value: shown,
            points: { show: c.points ? true : undefined, size: 5, fill: c.colour } })),
        ],
        cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "bloomery" } },
        legend: { live: true },
        hooks: {
          draw: [(self) => this.drawEvents(self)],
          setSelect: [(self) => this.selected(self)],
          setCursor: [(self) => this.pointed(self)],
        },
      }, data, this.canvas);
      const named = this.canvas.querySelectorAll(".u-legend .u-series"); // the first is the axis
      curves.forEach((curve, place) => { named[place + 1].hidden = Boolean(curve.quiet); });
      const over = this.canvas.querySelector(".u-over");
      over.addEventListener("dblclick", () => this.owner.move("all"));
      this.canvas.querySelectorAll("canvas").forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
    }

    limits(low, high) {
      if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
      if (this.ceiling > low) high = Math.min(high, this.ceiling);
      if (this.spec.plain) low = Math.min(low, 0);
      const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
      return [low >= 0 && low < room ? 0 : low - room, high + room];
    }

    width() { return Math.max(240, this.element.clientWidth - 20); }
    resize() { if (this.plot && Math.abs(this.plot.width - this.width()) > 2) this.plot.setSize({ width: this.width(), height: 260 }); }

    scale() {
      const [begin, end] = this.owner.range();
      this.plot.batch(() => { this.plot.setScale("x", { min: begin, max: end }); });
    }

    selected(self) {
      if (self.select.width > 4) {
        this.owner.zoom(self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x"));
      }
      if (self.select.width) self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }

    drawEvents(self) {
      this.frames += 1;
      this.marks = [];
      const context = self.ctx, { left, top, width, height } = self.bbox;
      const style = getComputedStyle(document.documentElement);
      const colours = { bad: style.getPropertyValue("--bad").trim(), warning: style.getPropertyValue("--attention").trim(), info: style.getPropertyValue("--soft").trim() };
      context.save();
      context.textAlign = "center";
      context.font = Math.round(11 * devicePixelRatio) + "px sans-serif";
      for (const event of this.owner.marks()) {
        const at = event.at[this.owner.axis];
        if (at === undefined) continue;
        const x = self.valToPos(at, "x", true);
        if (x < left || x > left + width) continue;
        this.marks.push({ x: (x - left) / devicePixelRatio, event });
        context.strokeStyle = context.fillStyle = colours[event.level] || colours.info;
        context.lineWidth = devicePixelRatio;
        context.setLineDash(event.level === "bad" ? [] : [4, 4]);
        context.beginPath();
        context.moveTo(x, top + 12 * devicePixelRatio);
        context.lineTo(x, top + height);
        context.globalAlpha = event.level === "info" ? 0.45 : 0.8;
        context.stroke();
        context.fillText({ bad: "▲", warning: "◆" }[event.level] || "·", x, top + 10 * devicePixelRatio);
        context.globalAlpha = 1;
      }
      context.restore();
    }

    pointed(self) {
      const x = self.cursor.left;
      if (x === undefined || x < 0 || !this.marks) return;
      const near = this.marks.filter((mark) => Math.abs(mark.x - x) < 7);
      this.note.textContent = near.slice(-3).map((mark) => bloomery.eventWords(mark.event)).join(" | ");
    }

    summary(curves) {
      if (this.spec.spent) return this.parts(curves);
      const main = curves.find((c) => c.main) || curves[curves.length - 1];
      const known = main.y.filter((v) => v !== null);
      if (!known.length) return "no finite value in this range";
      let low = Infinity, high = -Infinity;
      for (const v of known) { if (v < low) low = v; if (v > high) high = v; }
      return main.label + ": now " + bloomery.number(known[known.length - 1]) + ", from " + bloomery.number(low) + " to " + bloomery.number(high);
    }

    // The longest parts of the newest step; and whether one is cut off, such as the first step, which compiles.
    parts(curves) {
      const newest = curves.map((c) => [c.label, c.y.filter((v) => v !== null).pop() || 0]).sort((a, b) => b[1] - a[1]);
      const highest = Math.max(...curves.flatMap((c) => c.y));
      const cut = this.ceiling > 0 && highest > this.ceiling ? "; cut off above " + bloomery.number(this.ceiling) + ", the longest took " + bloomery.number(highest) : "";
      return "now " + newest.slice(0, 3).map(([label, value]) => label + " " + bloomery.number(value)).join(", ") + cut;
    }
  };

  function middle(values) {
    const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor(sorted.length / 2)] : 0;
  }
  bloomery.DASHES = DASHES;
})();
