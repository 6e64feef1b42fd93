// The live view: /metrics once a second, as figures of now and of the last minute.

const PREFIX = "tokenspeed:";
const WINDOW = 60; // snapshots that are kept, one a second
const show = (id, text) => { document.getElementById(id).textContent = text; };

/** The text exposition as a map: name -> list of {labels, value}. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const rows = (shot, name) => shot.values.get(PREFIX + name) ?? [];
const total = (shot, name) => rows(shot, name).reduce((sum, row) => sum + row.value, 0);

/** How much a counter grew between two snapshots. */
const grew = (from, to, name) => Math.max(0, total(to, name) - total(from, name));
const perSecond = (from, to, name) => grew(from, to, name) / Math.max(1e-3, (to.at - from.at) / 1000);

/** The bound under which a share of what a histogram saw between two snapshots lies, seconds; null for nothing seen. */
export function quantile(from, to, name, share) {
  const before = new Map(rows(from, `${name}_bucket`).map((row) => [row.labels.le, row.value]));
  const seen = rows(to, `${name}_bucket`)
    .map((row) => [row.labels.le === "+Inf" ? Infinity : Number(row.labels.le), row.value - (before.get(row.labels.le) ?? 0)])
    .sort((a, b) => a[0] - b[0]);
  const count = seen.at(-1)?.[1] ?? 0;
  if (!count) return null;
  let low = 0, below = 0;
  for (const [bound, cumulated] of seen) {
    if (cumulated >= share * count) {
      if (bound === Infinity) return low;
      return low + (bound - low) * ((share * count - below) / (cumulated - below));
    }
    low = bound;
    below = cumulated;
  }
  return low;
}

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 0 : 1));
const seconds = (value) => (value === null ? "–" : value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`);
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const bytes = (value) => (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`);

function draw(shots) {
  const now = shots.at(-1), last = shots.at(-2) ?? now, first = shots[0];
  show("running", total(now, "num_requests_running"));
  show("waiting", total(now, "num_requests_waiting"));
  const ended = rows(now, "request_success_total").map((row) => `${row.value} ${row.labels.finished_reason}`);
  show("ended", ended.join(", ") || "none");
  show("retracted", total(now, "num_preemptions_total"));
  show("generated", number(perSecond(last, now, "generation_tokens_total")));
  show("prompted", number(perSecond(last, now, "prompt_tokens_total")));
  show("steps", number(perSecond(last, now, "engine_steps_total")));

  const rates = shots.slice(1).map((shot, i) => perSecond(shots[i], shot, "generation_tokens_total"));
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${120 - 2 * (rates.length - 1 - i)},${29 - (28 * rate) / top}`);
  document.querySelector("#spark polyline").setAttribute("points", points.join(" "));

  const used = total(now, "kv_cache_usage_perc");
  document.getElementById("device").value = used;
  show("device-text", `${(100 * used).toFixed(0)} % held by requests`);
  const capacity = total(now, "host_kv_capacity_bytes");
  document.getElementById("host-row").hidden = !capacity;
  if (capacity) {
    const held = total(now, "host_kv_bytes");
    document.getElementById("host").value = held / capacity;
    show("host-text", `${bytes(held)} of ${bytes(capacity)}`);
  }
  const read = rows(now, "kv_storage_bytes_total");
  document.getElementById("storage-row").hidden = !read.length;
  show("storage", bytes(read.filter((row) => row.labels.direction === "read").reduce((sum, row) => sum + row.value, 0)));

  show("hits", share(grew(first, now, "prefix_cache_hits_total"), grew(first, now, "prefix_cache_queries_total")));
  show("hits-ever", share(total(now, "prefix_cache_hits_total"), total(now, "prefix_cache_queries_total")));
  const tiers = rows(now, "prefix_cache_hits_by_tier_total").map((row) => `${row.labels.tier} ${row.value.toLocaleString("en")}`);
  show("tiers", tiers.length ? `by tier: ${tiers.join(", ")}` : "");

  for (const [id, name] of [["first", "time_to_first_token_seconds"], ["between", "inter_token_latency_seconds"], ["whole", "e2e_request_latency_seconds"]]) {
    show(`${id}-50`, seconds(quantile(first, now, name, 0.5)));
    show(`${id}-95`, seconds(quantile(first, now, name, 0.95)));
  }
}

function health(text, good) {
  show("health", text);
  document.getElementById("health").className = `state ${good ? "good" : "bad"}`;
}

const shots = [];

async function look() {
  try {
    const [state, metrics] = await Promise.all([fetch("/health"), fetch("/metrics")]);
    health((await state.json()).status, state.ok);
    shots.push({ at: performance.now(), values: parse(await metrics.text()) });
    if (shots.length > WINDOW + 1) shots.shift();
    draw(shots);
  } catch {
    health("not reached", false);
  }
  setTimeout(look, 1000);
}

look();
