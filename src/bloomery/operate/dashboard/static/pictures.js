// Pictures of a run's parts: the mesh by time and memory, the ring between peers, and the rounds over time.
"use strict";
var bloomery = window.bloomery || {};
window.bloomery = bloomery;

(function () {
  const el = bloomery.el;
  const MOST_DRAWN = 24, MOST_ROWS = 64, ROUNDS = 20;

  function svg(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "fill" || name === "stroke") element.style[name] = value; // a variable follows dark and light
      else element.setAttribute(name, value);
    }
    for (const child of children) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    return element;
  }

  const ink = { good: "var(--good)", attention: "var(--attention)", bad: "var(--bad)", soft: "var(--soft)", ink: "var(--ink)", line: "var(--line)", heat: "rgb(var(--heat))" };

  const short = (name, most) => (name.length > most ? name.slice(0, most - 1) + "…" : name);

  // A table with a cell for each rank: replicas beneath each other, stages and tensor parts side by side.
  bloomery.meshMap = function (panel) {
    if (panel.rows.length < 2) return el("div", {});
    const sizes = panel.degrees, hasPlaces = sizes.data !== undefined;
    const across = [];
    for (let stage = 0; stage < (hasPlaces ? sizes.pipeline : 1); stage += 1)
      for (let part = 0; part < (hasPlaces ? sizes.tensor : panel.rows.length); part += 1) across.push([stage, part]);
    const column = ([stage, part]) => (!hasPlaces ? "" : [sizes.pipeline > 1 ? "stage " + stage : "", sizes.tensor > 1 ? "tensor " + part : ""].filter(Boolean).join(", ") || "rank");
    const byPlace = {};
    panel.rows.forEach((row, number) => { byPlace[hasPlaces ? [row.place.data, row.place.pipeline, row.place.tensor] : [0, 0, number]] = row; });
    const usual = Math.min(...panel.rows.map((row) => row.own_s).filter((own) => own > 0));
    const body = [];
    for (let replica = 0; replica < (hasPlaces ? sizes.data : 1); replica += 1) {
      const cells = across.map(([stage, part]) => {
        const row = byPlace[[replica, stage, part]];
        if (!row) return el("td", {}, "–");
        const cell = el("td", { class: "rank" + (row.is_slow ? " slow" : "") + (row.died ? " gone" : "") },
          el("span", { class: "soft" }, "rank " + row.rank + " "), row.died ? "✖ gone" : (row.is_slow ? "▲ " : "") + row.own_s.toFixed(3));
        const share = Math.min(1, Math.max(0, row.own_s / usual - 1) / 0.5);
        cell.style.background = "rgba(var(--heat), " + (0.38 * share).toFixed(3) + ")";
        return cell;
      });
      body.push(el("tr", {}, el("th", { scope: "row" }, hasPlaces && sizes.data > 1 ? "replica " + replica : ""), ...cells));
    }
    const head = el("tr", {}, el("td", {}), ...across.map((place) => el("th", { scope: "col" }, column(place))));
    return el("div", {}, el("p", { class: panel.rows.some((row) => row.is_slow) ? "told" : "soft" }, panel.told),
      el("table", { class: "mesh" }, el("caption", { class: "soft" }, "Seconds by itself"), el("thead", {}, head), el("tbody", {}, ...body)));
  };

  bloomery.stageTable = function (stages) {
    if (!stages.length) return el("div", {});
    const most = Math.max(...stages.map((stage) => stage.most_bytes));
    const rows = stages.map((stage) => {
      const bar = el("div", { class: "bar" });
      bar.style.width = (100 * stage.most_bytes / most).toFixed(1) + "%";
      return [stage.stage, stage.ranks, bloomery.number(stage.mean_bytes) + "B", bloomery.number(stage.most_bytes) + "B", stage.fullest, bar];
    });
    const table = bloomery.table([["stage"], ["ranks"], ["mean"], ["most"], ["of rank"], ["of the fullest", true]], rows, "Memory by pipeline stage");
    table.querySelectorAll(".bar").forEach((bar) => bar.parentElement.classList.add("barcell"));
    return table;
  };

  // The newest ring: a circle of peers, with the rate that was measured from each to the next.
  bloomery.ringPicture = function (told) {
    const ring = told.ring;
    if (!ring || ring.length < 2) return el("div", {});
    const rate = (value) => (value === null ? "not measured" : bloomery.number(value) + " Mbit/s");
    const known = ring.map(([, value]) => value).filter((value) => value !== null), slowest = Math.min(...known);
    const next = (place) => ring[(place + 1) % ring.length][0];
    const words = "Ring of the newest round: " + ring.map(([name, value], place) => name + " to " + next(place) + " " + rate(value)).join(", ");
    if (ring.length > MOST_DRAWN) return bloomery.table([["peer", true], ["next in the ring", true], ["rate"]], ring.map(([name, value], place) => [name, next(place), rate(value)]), "Ring of the newest round");
    const at = (place, far) => [320 + 1.55 * far * Math.sin(2 * Math.PI * place / ring.length), 180 - far * Math.cos(2 * Math.PI * place / ring.length)];
    const drawn = svg("svg", { viewBox: "0 0 640 360", role: "img", "aria-label": words, class: "ring" });
    ring.forEach(([name, value], place) => {
      const [x1, y1] = at(place, 120), [x2, y2] = at(place + 1, 120), isSlowest = value !== null && value === slowest && known.length > 1;
      drawn.append(svg("line", { x1, y1, x2, y2, stroke: isSlowest ? ink.bad : ink.soft, "stroke-width": value === null ? 1 : 2 + Math.log10(1 + value), "stroke-dasharray": value === null ? "3 4" : "none" }, svg("title", {}, name + " → " + next(place) + ": " + rate(value))));
      if (value !== null && (ring.length > 2 || place === 0)) {
        const [x, y] = at(place + 0.5, ring.length > 2 ? 124 * Math.cos(Math.PI / ring.length) : 24);
        drawn.append(svg("text", { x, y, "text-anchor": "middle", "font-size": 13, fill: isSlowest ? ink.bad : ink.ink }, (isSlowest ? "slowest: " : "") + rate(value)));
      }
    });
    const states = Object.fromEntries(told.peers.map((peer) => [peer.name, peer]));
    ring.forEach(([name], place) => {
      const [x, y] = at(place, 120), [lx, ly] = at(place, 142), side = Math.sin(2 * Math.PI * place / ring.length), isIn = states[name] && states[name].in_newest;
      drawn.append(svg("circle", { cx: x, cy: y, r: 9, fill: isIn ? ink.good : ink.attention }, svg("title", {}, name)));
      drawn.append(svg("text", { x: lx - 16 * side, y: ly + 5, "text-anchor": side > 0.3 ? "start" : side < -0.3 ? "end" : "middle", "font-size": 14, "font-weight": name === told.me ? 700 : 400, fill: ink.ink }, short(name, 16) + (isIn ? "" : " (not in the newest round)")));
    });
    return drawn;
  };

  // Rounds over time: for each peer and round a bar of local steps and one of the all-reduce; hollow where it was not in.
  bloomery.roundPicture = function (told) {
    const rounds = told.rounds.slice(-ROUNDS).filter((round) => round.end > round.begin), peers = told.peers.slice(0, MOST_ROWS);
    if (!rounds.length) return el("div", {});
    const begin = rounds[0].begin, end = rounds[rounds.length - 1].end, left = 120, width = 860, row = 22;
    const x = (time) => left + width * (time - begin) / (end - begin);
    const drawn = svg("svg", { viewBox: "0 0 1000 " + (30 + row * peers.length), role: "img", class: "rounds",
      "aria-label": "The newest " + rounds.length + " rounds of " + peers.length + " peers over time; the tables beneath hold the same" });
    rounds.forEach((round) => {
      const from = x(round.begin), to = x(round.end), joint = x(Math.max(round.begin, round.end - (round.ring_s || 0)));
      drawn.append(svg("line", { x1: to, x2: to, y1: 18, y2: 24 + row * peers.length, stroke: ink.line }));
      if (to - from > 24) drawn.append(svg("text", { x: (from + to) / 2, y: 14, "text-anchor": "middle", "font-size": 12, fill: ink.soft }, round.round));
      peers.forEach((peer, place) => {
        const y = 22 + row * place, isIn = round.members.includes(peer.name);
        const words = peer.name + ", round " + round.round + ": " + (isIn ? bloomery.duration(joint === to ? round.end - round.begin : round.end - round.begin - round.ring_s) + " of steps, all-reduce " + bloomery.duration(round.ring_s) : "not in it");
        drawn.append(svg("rect", { x: from + 1, y, width: Math.max(1, joint - from - 2), height: row - 6, fill: isIn ? ink.heat : "none", stroke: isIn ? "none" : ink.attention, "stroke-dasharray": "3 3" }, svg("title", {}, words)));
        if (isIn) drawn.append(svg("rect", { x: joint - 1, y, width: Math.max(1.5, to - joint), height: row - 6, fill: ink.attention }, svg("title", {}, words)));
      });
    });
    peers.forEach((peer, place) => drawn.append(svg("text", { x: left - 8, y: 34 + row * place, "text-anchor": "end", "font-size": 13, "font-weight": peer.name === told.me ? 700 : 400, fill: peer.in_newest ? ink.ink : ink.attention }, (peer.in_newest ? "" : "✖ ") + short(peer.name, 14))));
    const key = el("p", { class: "hint" }, "Rounds over time: ", swatch(ink.heat), "local steps, ", swatch(ink.attention), "all-reduce; dashed: not in that round.");
    return el("div", {}, key, drawn);
  };

  function swatch(colour) {
    const mark = el("span", { class: "swatch" });
    mark.style.background = colour;
    return mark;
  }
})();
