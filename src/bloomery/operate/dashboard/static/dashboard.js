// The page: it asks the server (or the data inside a saved report) for runs, curves and tables, and draws them.
"use strict";

(function () {
  const el = bloomery.el, byId = (id) => document.getElementById(id);
  const SPENT = "spent/", POINTS = 800, MOST_RUNS = 7, EVENTS_MS = 2000, NAMED_BRANCHES = 3;
  const SPECS = [
    { id: "loss", title: "Loss", unit: "nats a token", column: "loss", heldOut: true },
    { id: "norm", title: "Gradient norm", column: "gradient_norm" },
    { id: "rate", title: "Learning rate", column: "learning_rate", plain: true },
    { id: "batch", title: "Global batch", unit: "samples", column: "global_batch", plain: true },
    { id: "tokens", title: "Throughput", unit: "tokens a second", column: "tokens_per_s" },
    { id: "flops", title: "Model TFLOPs of a rank", column: "model_tflops" },
    { id: "mfu", title: "MFU", unit: "share of the peak", column: "mfu" },
    { id: "parts", title: "Parts of a step", unit: "seconds, smoothed", spent: true },
    { id: "queue", title: "Batches read ahead", column: "data_queue" },
    { id: "memory", title: "Memory of a rank", unit: "bytes", column: "memory_bytes" },
    { id: "refused", title: "Refused updates", column: "refused_updates", plain: true, dull: 0 },
    { id: "peers", title: "Peers at once", column: "peers", plain: true, dull: 1 },
  ];

  // Where data comes from: a server, or what `bloomery report --html` wrote into this file.
  const recorded = byId("recorded") ? JSON.parse(byId("recorded").textContent) : null;
  const ask = async (path) => {
    const answer = await fetch(path, { headers: { Accept: "application/json" } });
    if (answer.status === 401) { byId("session").hidden = false; throw new Error("a token is wanted"); }
    if (!answer.ok) throw new Error("the server answered " + answer.status);
    return answer.json();
  };
  const source = recorded ? {
    runs: async () => recorded,
    curves: async (run, names, axis) => recorded.curves[run][axis].filter((curve) => names.includes(curve.name)),
    panels: async (run) => recorded.panels[run],
  } : {
    runs: () => ask("api/runs"),
    curves: (run, names, axis, begin, end) => {
      const query = new URLSearchParams({ run: run, axis: axis, points: POINTS });
      for (const name of names) query.append("name", name);
      if (begin !== null) { query.set("begin", begin); query.set("end", end); }
      return ask("api/curves?" + query);
    },
    panels: (run) => ask("api/panels?run=" + run),
  };

  const page = {
    axis: "step", runs: [], chosen: null, focused: 0, window: null, whole: [0, 1], events: {}, curves: {}, versions: {},
    axisLabel() { return { step: "step", tokens: "tokens", time: "time" }[this.axis]; },
    isLog(spec) { return byId("show-log").checked && ["loss", "norm"].includes(spec.id); },
    range() { return this.window || this.whole; },
    marks() {
      const shown = [...(this.chosen || [])].flatMap((run) => this.events[run] || []);
      return shown.filter((event) => event.level !== "info" || event.kind === "start").slice(-400);
    },
    zoom(begin, end) { this.window = [begin, end]; this.moved(); },
    move(how) {
      const [low, high] = this.range(), width = high - low, [first, last] = this.whole;
      if (how === "all") this.window = null;
      else if (how === "recent") this.window = [last - (last - first) / 10, last];
      else if (how === "in") this.window = [low + width / 4, high - width / 4];
      else if (how === "out") this.window = width * 2 >= last - first ? null : [low - width / 2, high + width / 2];
      else {
        const by = (how === "left" ? -1 : 1) * width / 4;
        this.window = [low + by, high + by];
      }
      this.moved();
    },
    moved() {
      for (const chart of charts) if (chart.isSeen && chart.plot && !chart.element.hidden) chart.scale();
      const [low, high] = this.range(), shown = this.axis === "time" ? bloomery.when : bloomery.number;
      byId("range").textContent = this.window ? "from " + shown(low) + " to " + shown(high) : "the whole run";
      clearTimeout(this.later);
      this.later = setTimeout(() => loadCurves().catch(report), 120);
    },
  };
  bloomery.page = page;
  const charts = SPECS.map((spec) => new bloomery.Chart(spec, page));
  bloomery.charts = charts;
  byId("charts").append(...charts.map((chart) => chart.element));

  function report(error) { byId("connection").textContent = "Not up to date: " + error.message; }

  function namesOf(run) {
    const names = [];
    for (const spec of SPECS) {
      if (spec.spent) names.push(...run.names.filter((name) => name.startsWith(SPENT)).map((name) => name + "~"));
      else if (run.names.includes(spec.column)) {
        if (spec.plain || byId("show-raw").checked) names.push(spec.column);
        if (!spec.plain && byId("show-smooth").checked) names.push(spec.column + "~");
        if (!spec.plain && byId("show-discarded").checked) names.push(spec.column + "!");
      }
    }
    return names.concat(run.names.filter((name) => name.startsWith("held_out")));
  }

  async function loadCurves() {
    const turn = (page.turn = (page.turn || 0) + 1), [begin, end] = page.window || [null, null], axis = page.axis;
    const chosen = [...(page.chosen || [])].filter((run) => page.runs[run]);
    const answers = await Promise.all(chosen.map((run) => source.curves(run, namesOf(page.runs[run]), axis, begin, end)));
    if (turn !== page.turn) return; // a later question is under way
    page.curves = {};
    chosen.forEach((run, place) => { page.curves[run] = answers[place]; });
    if (!page.window) page.whole = extent(answers);
    for (const chart of charts) chart.draw(curvesOf(chart.spec, chosen));
    byId("no-curves").hidden = charts.some((chart) => !chart.element.hidden);
  }

  function extent(answers) {
    let low = Infinity, high = -Infinity;
    for (const curve of answers.flat()) {
      if (!curve.x.length) continue;
      low = Math.min(low, curve.x[0]);
      high = Math.max(high, curve.x[curve.x.length - 1]);
    }
    return low < high ? [low, high] : Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
  }

  // A run's name among those that are drawn: its directory, and its recipe only where that tells two apart.
  function nameOf(run, chosen) {
    const plain = (place) => page.runs[place].name.replace(/ \([^()]*\)$/, "");
    return chosen.some((other) => other !== run && plain(other) === plain(run)) ? page.runs[run].name : plain(run);
  }

  // With several runs the legend names one curve for each, and the parts of a step are those of the focused run.
  function curvesOf(spec, chosen) {
    const drawn = [], several = chosen.length > 1, parted = chosen.includes(page.focused) ? page.focused : chosen[0];
    for (const run of chosen) {
      const prefix = several ? nameOf(run, chosen) + ": " : "";
      const all = page.curves[run] || [], colour = bloomery.colour(run);
      if (spec.spent && run !== parted) continue;
      if (spec.spent) {
        const parts = all.filter((curve) => curve.name.startsWith(SPENT));
        parts.forEach((curve, place) => drawn.push({ label: prefix + curve.name.slice(SPENT.length, -1), colour: bloomery.colour(place + run),
          dash: bloomery.DASHES[Math.floor(place / 7) % 6], width: 1.5, x: curve.x, y: curve.y }));
        continue;
      }
      const raw = all.find((curve) => curve.name === spec.column), smooth = all.find((curve) => curve.name === spec.column + "~");
      all.filter((curve) => curve.name === spec.column + "!").forEach((curve, place) => drawn.push({
        quiet: several || place >= NAMED_BRANCHES, label: prefix + "discarded, incarnation " + curve.incarnation, colour: bloomery.isDark() ? "#9aa1ab" : "#6b7178", dash: [3, 3], width: 1, x: curve.x, y: curve.y }));
      if (raw) drawn.push({ label: prefix + (spec.plain ? spec.title.toLowerCase() : "each step"), colour: smooth ? colour + "77" : colour, width: smooth ? 1 : 1.5, dash: [], quiet: several && Boolean(smooth), x: raw.x, y: raw.y, main: true });
      if (smooth) drawn.push({ label: prefix + "smoothed", colour: colour, width: 2, dash: [], x: smooth.x, y: smooth.y });
      if (spec.heldOut) all.filter((curve) => curve.name.startsWith("held_out")).forEach((curve, place) => drawn.push({
        label: prefix + (curve.name === "held_out" ? "held out" : "held out " + curve.name.slice("held_out/".length)),
        colour: several ? colour : bloomery.colour(run + place + 1), dash: bloomery.DASHES[(place + 1) % 6], width: 1.5, points: true, x: curve.x, y: curve.y }));
    }
    const isDull = spec.dull !== undefined && drawn.every((curve) => curve.y.every((y) => y === spec.dull || y === null));
    return isDull ? [] : drawn;
  }

  function drawCards() {
    const cards = page.runs.map((run, place) => {
      const card = bloomery.card(run, bloomery.colour(place));
      const box = el("input", { type: "checkbox", value: place });
      box.checked = page.chosen.has(place);
      box.addEventListener("change", () => {
        if (box.checked && page.chosen.size < MOST_RUNS) page.chosen.add(place); else page.chosen.delete(place);
        loadCurves().then(loadEvents).catch(report);
      });
      if (page.runs.length > 1) card.append(el("p", {}, el("label", {}, box, " draw its curves")));
      return card;
    });
    const held = document.activeElement && byId("glance").contains(document.activeElement) ? document.activeElement.value : null;
    bloomery.fill(byId("glance"), ...cards);
    if (held !== null) { const again = byId("glance").querySelector('input[value="' + Number(held) + '"]'); if (again) again.focus(); }
    const bad = page.runs.filter((run) => run.health !== "good").length;
    document.title = (bad ? "(" + bad + ") " : "") + page.runs.map((run) => run.name).join(", ") + " · bloomery";
    if (byId("focused").options.length !== page.runs.length) {
      bloomery.fill(byId("focused"), ...page.runs.map((run, place) => el("option", { value: place }, run.name)));
      byId("focused").value = String(page.focused);
    }
  }

  // The events of the runs that are drawn beside the focused one: less often, for their tables are not shown.
  async function loadEvents() {
    for (const run of page.chosen) {
      const known = page.versions[run], now = performance.now();
      if (!page.runs[run] || (known && known.version === page.runs[run].version)) continue;
      if (known && now - known.at < EVENTS_MS) {
        clearTimeout(page.eventsLater);
        page.eventsLater = setTimeout(() => loadEvents().catch(report), EVENTS_MS);
        continue;
      }
      page.versions[run] = { version: page.runs[run].version, at: now };
      page.events[run] = (await source.panels(run)).events;
    }
    for (const chart of charts) if (chart.plot && !chart.element.hidden) chart.plot.redraw(false);
  }

  async function loadPanels() {
    if (!page.runs[page.focused]) return;
    const told = await source.panels(page.focused);
    page.events[page.focused] = told.events;
    page.versions[page.focused] = { version: page.runs[page.focused].version, at: performance.now() };
    drawEvents(told.events);
    bloomery.fill(byId("save-table"), bloomery.saveTable(told.saves));
    bloomery.fill(byId("goodput-table"), ...bloomery.goodputTable(told.goodput));
    bloomery.fill(byId("mesh-map"), bloomery.meshMap(told.ranks), bloomery.stageTable(told.ranks.stages));
    byId("mesh-map").hidden = !byId("mesh-map").textContent;
    bloomery.fill(byId("rank-table"), bloomery.rankTable(told.ranks.rows));
    byId("peer-pictures").hidden = !told.rounds.rounds;
    bloomery.fill(byId("peer-pictures"), ...(told.rounds.rounds ? [bloomery.ringPicture(told.rounds), bloomery.roundPicture(told.rounds)] : []));
    bloomery.fill(byId("peer-table"), bloomery.peerTable(told.rounds));
    await loadEvents();
  }

  function drawEvents(events) {
    const only = byId("only-trouble").checked;
    const shown = events.filter((event) => !only || event.level !== "info").slice(-300).reverse();
    const drawn = JSON.stringify([page.focused, page.axis, shown.map((event) => [event.number, event.at[page.axis]])]);
    if (drawn === page.drawnEvents) return; // whoever reads the list, or walks it by the keyboard, is not disturbed
    page.drawnEvents = drawn;
    const place = byId("event-list").parentElement.scrollTop, held = document.activeElement.dataset.event;
    bloomery.fill(byId("event-list"), ...shown.map((event) => {
      const line = el("li", { class: "event-" + event.level }, el("span", { class: "soft" }, bloomery.when(event.time)),
        el("span", { class: "kind" }, event.kind), event.step === null ? "" : "step " + event.step + ": ", event.text);
      const at = event.at[page.axis];
      if (at !== undefined) {
        const button = el("button", { type: "button", "data-event": event.number, "aria-label": "show " + event.kind + " at step " + event.step + " on the curves" }, "show");
        button.addEventListener("click", () => {
          const width = Math.max((page.whole[1] - page.whole[0]) / 20, 1e-9);
          page.zoom(at - width / 2, at + width / 2);
          byId("curves").scrollIntoView();
        });
        line.append(button);
      }
      return line;
    }));
    if (!shown.length) bloomery.fill(byId("event-list"), el("li", { class: "soft" }, "Nothing yet."));
    byId("event-list").parentElement.scrollTop = place;
    const again = held === undefined ? null : byId("event-list").querySelector('[data-event="' + Number(held) + '"]');
    if (again) again.focus({ preventScroll: true });
  }

  async function refresh() {
    if (page.busy) { page.again = true; return; }
    page.busy = true;
    try {
      const answer = await source.runs();
      page.runs = answer.runs;
      page.chosen = page.chosen || new Set(answer.runs.map((run, place) => place).slice(0, MOST_RUNS));
      page.isOld = !recorded && answer.runs.some((run, place) => run.version < answer.versions[place]);
      byId("session").hidden = true;
      byId("actions").hidden = byId("to-actions").hidden = !answer.actions;
      drawCards();
      await loadCurves();
      await loadPanels();
      byId("connection").textContent = recorded ? "A report of " + bloomery.when(answer.time) : "Up to date at " + bloomery.when(answer.time);
      document.documentElement.dataset.loaded = String(Number(document.documentElement.dataset.loaded || 0) + 1);
    } catch (error) {
      page.isOld = false;
      report(error);
    } finally {
      page.busy = false;
      if (page.isOld && !page.again) setTimeout(refresh, 1000);
      if (page.again) { page.again = false; setTimeout(refresh, 500); }
    }
  }

  // Server-sent events say that something changed. A browser connects again by itself after a restart.
  function listen() {
    const stream = new EventSource("api/changes");
    stream.addEventListener("change", () => refresh());
    stream.onopen = () => refresh();
    stream.onerror = () => {
      byId("connection").textContent = "The server does not answer; trying again.";
      if (stream.readyState === EventSource.CLOSED) { stream.close(); setTimeout(listen, 2000); }
    };
  }

  document.querySelectorAll('input[name="axis"]').forEach((input) => input.addEventListener("change", () => {
    page.axis = input.value;
    page.window = null;
    loadCurves().then(() => { page.moved(); drawEvents(page.events[page.focused] || []); }).catch(report);
  }));
  for (const id of ["show-raw", "show-smooth", "show-discarded", "show-log"]) byId(id).addEventListener("change", () => loadCurves().catch(report));
  byId("only-trouble").addEventListener("change", () => drawEvents(page.events[page.focused] || []));
  document.querySelectorAll("[data-move]").forEach((button) => button.addEventListener("click", () => page.move(button.dataset.move)));
  byId("focused").addEventListener("change", (event) => {
    page.focused = Number(event.target.value);
    loadPanels().then(loadCurves).catch(report);
  });
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = bloomery.isDark() ? "light" : "dark";
    drawCards();
    loadCurves().catch(report);
  });
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { document.documentElement.dataset.theme = preferred.matches ? "dark" : "light"; };
  preferred.addEventListener("change", () => { follow(); refresh(); });
  follow();

  const send = (path, body, token) => fetch(path, { method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...(token ? { Authorization: "Bearer " + token } : {}) } });
  byId("session").addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await send("api/session", { token: byId("session-token").value });
    byId("session-told").textContent = answer.ok ? "" : "This is not the token.";
    if (answer.ok) { refresh(); listen(); }
  });
  byId("action-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = byId("action-name").value, run = page.runs[page.focused];
    if (name !== "save" && !window.confirm(name + ": " + run.name + "?")) return;
    const body = { run: page.focused, action: name, what: byId("action-what").value, why: byId("action-why").value };
    const answer = await send("api/action", body, byId("action-token").value);
    const told = await answer.json().catch(() => ({ told: "the server answered " + answer.status }));
    byId("action-told").textContent = told.told;
  });

  if (recorded) refresh();
  else { refresh(); listen(); }
})();
