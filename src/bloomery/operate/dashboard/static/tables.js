// Elements and tables. Whatever a journal holds enters the page as text, never as markup.
"use strict";
var bloomery = window.bloomery || {};
window.bloomery = bloomery;

(function () {
  bloomery.el = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    for (const child of children) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    return element;
  };
  const el = bloomery.el;

  bloomery.fill = function (element, ...children) { element.replaceChildren(...children); };

  bloomery.duration = function (seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
    if (seconds < 120) return seconds.toFixed(seconds < 10 ? 2 : 0) + " s";
    if (seconds < 7200) return (seconds / 60).toFixed(0) + " min";
    if (seconds < 259200) return (seconds / 3600).toFixed(1) + " h";
    return (seconds / 86400).toFixed(1) + " days";
  };

  bloomery.eventWords = function (event) {
    const step = event.step === null ? "" : ", step " + event.step;
    return bloomery.when(event.time) + step + ": " + event.kind + ": " + event.text;
  };

  // columns: [title, isText]; rows: arrays of text, numbers or elements.
  bloomery.table = function (columns, rows, caption) {
    const head = el("tr", {}, ...columns.map(([title, isText]) => el("th", { scope: "col", class: isText ? "text" : "" }, title)));
    const body = rows.map((row) => el("tr", {}, ...row.map((cell, place) => el("td", { class: columns[place][1] ? "text" : "" }, cell))));
    return el("table", {}, el("caption", { class: "soft" }, caption || ""), el("thead", {}, head), el("tbody", {}, ...body));
  };

  bloomery.nothing = function (text) { return el("p", { class: "soft" }, text); };

  bloomery.card = function (run, colour) {
    const words = { good: "Healthy", attention: "Needs a look", bad: "Not healthy" };
    const card = el("article", { class: "card " + run.health, "aria-label": run.name });
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = colour;
    card.append(el("h2", {}, swatch, run.name));
    card.append(el("p", {}, el("span", { class: "health" }, words[run.health] || run.health), ": " + run.state + (run.why ? " (" + run.why + ")" : "")));
    for (const problem of run.problems) card.append(el("p", { class: "problem" }, problem));
    if (run.step !== null) {
      const percent = run.done === null ? "" : ", " + (100 * run.done).toFixed(1) + "%";
      const of = run.steps === null ? "" : " of " + run.steps.toLocaleString("en");
      const left = run.left_s === null ? "" : run.done >= 1 ? "; all samples are used" : "; " + bloomery.duration(run.left_s) + " left" + (run.ends ? ", until " + bloomery.when(run.ends) : " of training");
      card.append(el("p", {}, "Step " + run.step.toLocaleString("en") + of + percent + left));
      if (run.done !== null) card.append(el("progress", { max: "1", value: String(run.done), "aria-label": "share of the samples that are used" }));
      const facts = [["loss", bloomery.number(run.loss)], ["held out", bloomery.number(run.held_out)], ["tokens", bloomery.number(run.tokens)],
        ["a step", bloomery.duration(run.step_s)], ["last save", run.saved_step === null ? "none" : "step " + run.saved_step + ", " + bloomery.when(run.saved)],
        ["ranks", run.ranks === null ? "–" : run.ranks + " × " + run.device], ["last sign", bloomery.when(run.written)]];
      card.append(el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
    }
    if (run.fork_of) card.append(el("p", { class: "soft" }, "Forked from " + run.fork_of));
    card.append(el("p", {}, run.night));
    card.append(el("p", {}, el("strong", {}, "To do: "), run.advice.join(" ")));
    return card;
  };

  bloomery.saveTable = function (rows) {
    if (!rows.length) return bloomery.nothing("No checkpoint yet.");
    const columns = [["step"], ["checkpoint", true], ["saved"], ["blocked"], ["durable", true], ["elsewhere", true], ["kept", true]];
    return bloomery.table(columns, rows.map((row) => [row.step.toLocaleString("en"), row.name, bloomery.when(row.time),
      bloomery.duration(row.blocked_s), row.durable ? "yes" : "not yet", row.backed_up ? "yes, verified" : "no", row.kept || "no longer here"]));
  };

  bloomery.goodputTable = function (told) {
    if (told.problem) return [bloomery.nothing(told.problem)];
    const percent = (share) => (100 * share).toFixed(1) + "%";
    const rows = Object.entries(told.seconds).sort((a, b) => b[1] - a[1]).map(([kind, seconds]) => {
      const bar = el("div", { class: "bar" });
      bar.style.width = (100 * told.shares[kind]).toFixed(2) + "%";
      return [kind, bloomery.duration(seconds), percent(told.shares[kind]), bar, told.meanings[kind] || ""];
    });
    const figures = "Effective time " + percent(told.effective_time) + ", ETTR " + percent(told.ettr) + ", goodput of tokens " + percent(told.token_goodput) + " of " + bloomery.duration(told.elapsed_s) + " (first rank).";
    const table = bloomery.table([["class", true], ["time"], ["share"], ["of all", true], ["what it is", true]], rows);
    table.querySelectorAll(".bar").forEach((bar) => bar.parentElement.classList.add("barcell"));
    const parts = [el("p", {}, figures), table];
    if (told.plan) parts.splice(1, 0, bloomery.planTable(told.plan));
    const causes = Object.entries(told.causes);
    if (causes.length) parts.push(bloomery.table([["cause", true], ["incidents"], ["time"], ["steps lost"]],
      causes.map(([cause, cost]) => [cause, cost.incidents, bloomery.duration(cost.seconds), cost.steps_lost.toLocaleString("en")])));
    return parts;
  };

  bloomery.planTable = function (plan) {
    const percent = (share) => (100 * share).toFixed(1) + "%", days = (value) => (value === null ? "–" : value.toFixed(2));
    return bloomery.table([["figure", true], ["plan"], ["so far"]], [
      ["tokens a second", bloomery.number(plan.planned_tokens_per_s), bloomery.number(plan.tokens_per_s)],
      ["share of the time that trains", percent(plan.planned_goodput), percent(plan.goodput)],
      ["days, at this pace", days(plan.planned_days), days(plan.days)]], "The plan beside the run");
  };

  bloomery.rankTable = function (rows) {
    if (!rows.length) return bloomery.nothing("No rank has written a heartbeat.");
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.seconds)))];
    const most = {};
    for (const name of names) most[name] = Math.max(...rows.map((row) => row.seconds[name] || 0), 1e-12);
    const columns = [["rank"], ["host", true], ["does", true], ["step"], ...names.map((name) => [name])];
    const table = bloomery.table(columns, rows.map((row) => [row.rank, row.host,
      row.died ? "gone: its process ended without a word" : row.silent_s === null ? row.activity : "silent for " + bloomery.duration(row.silent_s), row.step.toLocaleString("en"),
      ...names.map((name) => (row.seconds[name] || 0).toFixed(4))]));
    [...table.tBodies[0].rows].forEach((line, place) => {
      if (rows[place].silent_s !== null) line.cells[2].classList.add("problem");
      if (rows.length > 1) names.forEach((name, column) => {
        const share = (rows[place].seconds[name] || 0) / most[name];
        line.cells[4 + column].style.background = "rgba(var(--heat), " + (0.38 * share * share).toFixed(3) + ")";
      });
    });
    return table;
  };

  bloomery.peerTable = function (told) {
    if (!told.rounds) return bloomery.nothing("This run has one peer.");
    const rounds = told.rounds.slice(-40);
    const last = rounds[rounds.length - 1];
    const rows = told.peers.slice(0, 128).map((peer) => {
      const strip = el("span", { role: "img", "aria-label": "in " + peer.rounds + " of the newest " + told.rounds.length + " rounds" });
      for (const round of rounds) strip.append(el("span", { class: "round" + (round.members.includes(peer.name) ? " in" : "") }));
      return [peer.name + (peer.name === told.me ? " (this one)" : ""), peer.in_newest ? "in round " + last.round : "not in round " + last.round, strip, peer.left_out];
    });
    const seconds = rounds.map((round) => [round.round, bloomery.when(round.end), bloomery.duration(round.end - round.begin),
      bloomery.duration(round.ring_s), round.members.length, round.included ? "yes" : "no"]).reverse();
    return el("div", {}, bloomery.table([["peer", true], ["state", true], ["newest rounds", true], ["why it was left out", true]], rows),
      bloomery.table([["round"], ["committed"], ["took"], ["all-reduce"], ["peers"], ["with this one", true]], seconds));
  };
})();
