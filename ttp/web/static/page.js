// Draws the views that /events sends. All texts are inserted as text, not as HTML: they come from programs that crashed.
const $ = (id) => document.getElementById(id);
const GLYPH = { live: "·", frozen: "‖", lost: "✕", broken: "!", released: "↓", done: "✓", missing: "?", late: "…" };
const SAYS = {
  live: "live", frozen: "frozen", lost: "lost", broken: "broken: its program raised an exception", released: "told to exit",
  done: "done", missing: "not joined", late: "behind or silent",
};
const STAGE = {
  waiting: "Waiting for ranks", forming: "Ranks join and restore", training: "Training", freezing: "A fault: ranks are being frozen",
  saving: "A fault: the newest step is being written", mending: "A fault: it is being repaired in place", committing: "A fault: the checkpoint is being committed",
  saved: "Saved: ranks are being released", released: "Ranks exit, to be restarted", finished: "The job has finished",
};
const TONE = { training: "good", finished: "good", waiting: "idle", forming: "idle" };
const MANY = 512;
const AT_WORK = ["training", "freezing", "saving", "mending", "committing"];
let picked = false, now = null, late = new Set(), chosen = null, cells = [], drawn = [], shape = "", open = null, openFacts = "", follows = true, seenAt = 0;

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}
function set(element, text) { if (element.textContent !== text) element.textContent = text; }
function pairs(list, facts) {
  const text = JSON.stringify(facts);
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.replaceChildren(...facts.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
}
function rows(body, found) {
  const text = JSON.stringify(found);
  if (body.dataset.shown === text) return;
  body.dataset.shown = text;
  body.replaceChildren(...found.map((row) => {
    const made = make("tr");
    for (const [value, name] of row) made.append(make("td", value, name));
    return made;
  }));
}
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const clock = (unix) => new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
const size = (bytes) => bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
const ms = (value) => value < 1000 ? `${value.toFixed(1)} ms` : `${(value / 1000).toFixed(2)} s`;
function ago(unix) {
  const s = Math.max(0, Date.now() / 1000 - unix);
  return s < 90 ? `${Math.round(s)} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 129600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} d ago`;
}

// ------------------------------------------------------------------------------------------------------- above
function top() {
  const i = now.incident, over = now.error && now.ended, good = /^exit (0|75):/.test(now.ended);
  const tone = over ? (good ? "idle" : "bad") : now.error ? "bad" : TONE[now.stage] || "busy";
  set($("run"), now.run_id ? `· ${now.framework} job ${now.run_id}` : now.asks ? "" : "· incidents of a directory");
  set($("stage"), over ? "The job has ended" : now.error ? "The controller does not answer" : now.asks ? STAGE[now.stage] || now.stage : "No job is observed: only incidents are shown");
  $("now").className = `card wide tone-${now.asks ? tone : "idle"}`;
  const waits = over ? [now.ended, "its controller has ended too"] : now.error ? [now.error] : now.waits || [];
  rowsOf($("waits"), waits.length ? waits : now.stage === "training" ? [`all ${count(now.world_size, "rank")} make progress, at version ${now.newest}`] : []);
  const last = i || (now.incidents.length ? fromList(now.incidents[0]) : null);
  $("last").hidden = !last;
  document.title = title(i);
  if (!last) return;
  set($("last-title"), last.open ? "Incident now" : "Last incident");
  $("last").className = `card wide tone-${last.open ? "busy" : last.good === false || (last.good === null && !last.saved) ? "bad" : "good"}`;
  set($("cause"), last.cause || "no evidence was recorded");
  set($("saved"), last.saved ? last.saved + (last.bytes ? `, ${size(last.bytes)}` : "") + (last.path ? `: ${last.path}` : "") : last.open ? "nothing yet" : last.good ? "nothing had to be saved" : "NOTHING was saved");
  set($("outcome"), last.outcome || (last.open ? `not over: ${last.stage}` : ""));
  set($("when"), last.opened_unix_s ? `${clock(last.opened_unix_s)}, ${ago(last.opened_unix_s)}` : "");
}
function fromList(one) {
  return { ...one, open: false, path: one.checkpoint, saved: one.version === null ? "" : `version ${one.version}` };
}
function title(incident) {
  if (now.error) return now.ended ? "ended · ttp" : "✕ no controller · ttp";
  if (incident && incident.open) return `✕ ${incident.dead.length ? `rank ${incident.dead.join(", ")}` : "a fault"} · ttp`;
  return now.stage ? `${now.stage} · ttp` : "ttp";
}
function rowsOf(list, texts) {
  const text = texts.join("\n");
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.replaceChildren(...texts.map((one) => make("li", one)));
}
function facts() {
  const living = (now.counts.live || 0) + (now.counts.frozen || 0) + (now.counts.broken || 0);
  const found = [
    ["newest version", String(now.newest)],
    ["live ranks", `${living.toLocaleString("en")} of ${now.world_size.toLocaleString("en")}`],
    ["late", String(now.late.length)],
  ];
  if (now.groups.length) found.push(["fewest copies of a shard", `${now.groups[0].living} of ${now.groups[0].copies}`]);
  found.push(["launch", String(now.incarnation)], ["incidents", String(now.incidents_total)], ["false alarms", String(now.false_alarms)]);
  if (now.copied_version !== null) found.push(["second copies of version", String(now.copied_version)]);
  found.push(["standby controllers", now.standbys.length ? now.standbys.join(", ") : "none"], ["controller", `${now.controller}, pid ${now.pid}`]);
  if (now.save_dir) found.push(["saves to", now.save_dir]);
  pairs($("facts"), found);
}

// ------------------------------------------------------------------------------------------------------- ranks
function look(rank) { return now.state[rank] === "live" && late.has(rank) ? "late" : now.state[rank]; }
function grid() {
  const wanted = JSON.stringify(now.hosts);
  if (wanted !== shape) {
    shape = wanted;
    cells = []; drawn = [];
    const box = $("ranks");
    box.classList.toggle("many", now.world_size > MANY);
    box.replaceChildren(...now.hosts.map(([name, ranks]) => {
      const host = make("div", undefined, "host"), inner = make("div", undefined, "cells");
      host.setAttribute("role", "group");
      host.setAttribute("aria-label", name || "not joined");
      host.title = name || "not joined";
      const label = make("span", name || "not joined");
      label.setAttribute("aria-hidden", "true");
      inner.setAttribute("role", "presentation");
      for (const rank of ranks) {
        const cell = cells[rank] = make("div");
        cell.id = `rank-${rank}`;
        cell.dataset.rank = rank;
        cell.setAttribute("role", "option");
        cell.setAttribute("aria-selected", "false");
        inner.append(cell);
      }
      host.append(label, inner);
      return host;
    }));
  }
  const many = now.world_size > MANY;
  for (let rank = 0; rank < cells.length; rank++) {
    if (!cells[rank]) continue;
    const as = look(rank);
    if (drawn[rank] === as) continue;
    drawn[rank] = as;
    cells[rank].className = `cell ${as}`;
    if (many) cells[rank].textContent = GLYPH[as];
    else cells[rank].replaceChildren(make("b", String(rank)), make("i", GLYPH[as]));
    cells[rank].setAttribute("aria-label", `rank ${rank}: ${SAYS[as]}`);
    cells[rank].title = `rank ${rank} on ${now.hosts.find(([, ranks]) => ranks.includes(rank))?.[0] || "?"}: ${SAYS[as]}`;
  }
  const counts = {};
  for (const as of drawn) if (as) counts[as] = (counts[as] || 0) + 1;
  const text = JSON.stringify(counts);
  if ($("legend").dataset.shown !== text) {
    $("legend").dataset.shown = text;
    $("legend").replaceChildren(...Object.entries(counts).map(([as, n]) => {
      const one = make("span"), sign = make("span", GLYPH[as], `cell ${as}`);
      sign.setAttribute("aria-hidden", "true");
      one.append(sign, `${n.toLocaleString("en")} ${SAYS[as]}`);
      return one;
    }));
  }
  if (!picked || !cells[chosen]) choose(odd(-1) ?? 0, false);
  else detail();
}
function odd(after) {
  const size = cells.length;
  for (let step = 1; step <= size; step++) {
    const rank = (after + step) % size;
    if (["lost", "broken", "missing", "late"].includes(drawn[rank])) return rank;
  }
  return null;
}
function choose(rank, scroll = true) {
  if (rank === null || !cells[rank]) return;
  if (rank === chosen && cells[rank].classList.contains("chosen")) { detail(); return; }
  for (const cell of document.querySelectorAll(".chosen")) { cell.classList.remove("chosen"); cell.setAttribute("aria-selected", "false"); }
  chosen = rank;
  detail();
  $("ranks").setAttribute("aria-activedescendant", cells[rank].id);
  if (scroll) cells[rank].scrollIntoView({ block: "nearest" });
}
function detail() {
  const r = chosen;
  cells[r].classList.add("chosen");
  cells[r].setAttribute("aria-selected", "true");
  const host = now.hosts.find(([, ranks]) => ranks.includes(r));
  const found = [["rank", String(r)], ["state", SAYS[look(r)]], ["host", host && host[0] || "-"], ["pid", String(now.process[r] || "-")],
    ["version", String(now.version[r])], ["phase", now.phase[r] || "-"], ["silent for", `${Math.floor(now.silent[r])} s`]];
  if (now.activity[r]) found.push(["doing", now.activity[r]]);
  pairs($("detail"), found);
}
$("ranks").addEventListener("click", (event) => {
  const cell = event.target.closest(".cell");
  if (cell) pick(Number(cell.dataset.rank));
});
$("ranks").addEventListener("keydown", (event) => {
  const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen + 8, ArrowUp: chosen - 8, Home: 0, End: cells.length - 1, n: odd(chosen) }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  pick(to);
});
$("find").addEventListener("submit", (event) => { event.preventDefault(); pick(Number($("number").value)); });
function pick(rank) { picked = true; choose(rank); }

// ------------------------------------------------------------------------------------------------------- tables
function groups() {
  set($("groups-note"), `· those with the fewest live copies first, ${count(now.groups_total, "shard")} in all`);
  rows($("groups"), now.groups.map((g) => [[`${g.living} of ${g.copies}`, g.living < Math.min(2, g.copies) && AT_WORK.includes(now.stage) ? "tight thin" : "tight"], [g.name], [g.ranks], [g.gone || "-"]]));
}
function incidents() {
  const list = now.incidents;
  set($("incidents-note"), list.length ? `· ${list.length} recorded here` : now.incidents_total ? "· their files are on another host: run ttp web where save_dir can be read" : "· none yet");
  const text = JSON.stringify(list);
  if ($("incidents").dataset.shown !== text) {
    $("incidents").dataset.shown = text;
    $("incidents").replaceChildren(...list.map((one) => {
      const row = make("tr"), cell = make("td"), button = make("button", one.id);
      button.addEventListener("click", () => { follows = false; tell(one.id); });
      cell.append(button);
      row.append(cell, make("td", clock(one.opened_unix_s), "tight"), make("td", one.cause), make("td", one.version === null ? "-" : `version ${one.version}`, "tight"), make("td", one.outcome, one.good === false ? "thin" : ""));
      return row;
    }));
  }
  if (follows && list.length) tell(list[0].id);
  else if (open) tell(open);
}
async function tell(id) {
  const known = JSON.stringify([id, now.incidents.find((one) => one.id === id)]);
  if (openFacts === known) return;
  const before = openFacts;
  openFacts = known;
  try {
    const answer = await fetch(`api/v1/incidents/${encodeURIComponent(id)}`);
    if (!answer.ok) throw new Error(answer.statusText);
    story(await answer.json());
    open = id;
  } catch { openFacts = before; }
}
function story(one) {
  $("story").hidden = false;
  set($("story-title"), `Incident ${one.id}`);
  $("trace").href = `api/v1/incidents/${encodeURIComponent(one.id)}/trace.json`;
  $("trace").download = `${one.id}.json`;
  $("lanes").replaceChildren(lanes(one));
  $("lines").replaceChildren(...one.timeline.map((line) => {
    const row = make("tr"), text = make("td", line.text);
    if (line.detail) {
      const more = make("details");
      more.append(make("summary", "details"), make("pre", line.detail));
      text.append(more);
    }
    row.append(make("td", `+${ms(line.at_ms)}`, "tight"), make("td", line.kind, `tight kind-${/^\w+$/.test(line.kind) ? line.kind : "odd"}`), text);
    return row;
  }));
  if (one.more) $("lines").append(make("tr", `and ${one.more} lines more: ttp incidents --detail`));
}
function lanes(one) {
  const NS = "http://www.w3.org/2000/svg", left = 120, wide = 1000, high = 22;
  const svg = document.createElementNS(NS, "svg"), all = [{ label: "stages", ranks: "", spans: one.stages }, ...one.lanes];
  const put = (tag, attributes, text) => {
    const made = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
    return made;
  };
  const x = (at) => left + Math.min(1, at / one.length_ms) * (wide - left - 10);
  svg.setAttribute("viewBox", `0 0 ${wide} ${all.length * high + 22}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Lanes: ${all.map((lane) => `${lane.label} ${lane.spans.map((span) => `${span.text} from ${ms(span.begin)} to ${ms(span.end)}`).join(", ")}`).join("; ").slice(0, 2000)}`);
  for (let tick = 0; tick <= 5; tick++) {
    const at = one.length_ms * tick / 5;
    put("line", { x1: x(at), x2: x(at), y1: 0, y2: all.length * high, class: "axis" });
    put("text", { x: x(at), y: all.length * high + 14, "text-anchor": tick === 5 ? "end" : "middle", class: "soft" }, ms(at));
  }
  all.forEach((lane, index) => {
    put("text", { x: 4, y: index * high + 15 }, lane.label);
    for (const span of lane.spans) {
      const width = Math.max(2, x(span.end) - x(span.begin));
      const bar = put("rect", { x: x(span.begin), y: index * high + 3, width, height: 16, rx: 2, class: `bar ${/^\w+$/.test(span.kind) ? span.kind : ""}` });
      const tip = document.createElementNS(NS, "title");
      tip.textContent = `${span.text}: ${ms(span.begin)} to ${ms(span.end)}`;
      bar.append(tip);
      if (width > span.text.length * 7) put("text", { x: x(span.begin) + 4, y: index * high + 15 }, span.text);
    }
  });
  return svg;
}

// ------------------------------------------------------------------------------------------------------- events
function show(view) {
  now = view;
  late = new Set(view.late);
  seenAt = performance.now();
  top();
  if (now.state && now.state.length) { facts(); grid(); groups(); }
  incidents();
}
function connection() {
  const s = (performance.now() - seenAt) / 1000;
  const bad = !seenAt || s > 12;
  set($("connection"), !seenAt ? "connecting" : bad ? `no update for ${Math.round(s)} s: this page may be out of date` : now.error ? "out of date" : "live");
  $("connection").className = bad || now?.error ? "bad" : "";
  if (now && seenAt && now.incident) top();
}
const stream = new EventSource("events");
stream.onmessage = (event) => show(JSON.parse(event.data));
setInterval(connection, 1000);
