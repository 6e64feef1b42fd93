// The chat: one conversation with the server's model over /v1/chat/completions, streamed.

const get = (id) => document.getElementById(id);
const history = [];
let running = null; // AbortController of the answer that is coming

function turn(kind) {
  const element = document.createElement("div");
  element.className = `turn ${kind}`;
  get("talk").append(element);
  return element;
}

/** The part of a turn of this class, made where it is missing. Texts are set as texts: what a model writes is no HTML. */
function part(element, kind) {
  let found = element.querySelector(`.${kind}`);
  if (!found) {
    found = document.createElement("div");
    found.className = kind;
    element.append(found);
  }
  return found;
}

function headers() {
  const key = get("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function model() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const { id } = (await answer.json()).data[0];
  get("model").textContent = id;
  return id;
}

/** The `data` of a stream's events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

async function answer() {
  const system = get("system").value;
  const body = {
    model: await model(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (get("temperature").value) body.temperature = Number(get("temperature").value);
  if (get("most").value) body.max_tokens = Number(get("most").value);
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);

  const element = turn("assistant");
  let said = "", reason = "", usage = null;
  const started = performance.now();
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const { delta, finish_reason } of chunk.choices) {
        if (delta.reasoning_content) part(element, "thought").append(delta.reasoning_content);
        if (delta.content) {
          said += delta.content;
          part(element, "said").append(delta.content);
        }
        reason = finish_reason ?? reason;
      }
      get("talk").scrollTop = get("talk").scrollHeight;
    }
  } finally {
    history.push({ role: "assistant", content: said });
  }
  const took = (performance.now() - started) / 1000;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    part(element, "note").textContent =
      `${usage.completion_tokens} tokens, ${(usage.completion_tokens / took).toFixed(0)} a second; ` +
      `prompt ${usage.prompt_tokens}, of which cached ${cached}; ended: ${reason}`;
  }
}

get("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = get("say").value.trim();
  if (!text || running) return;
  history.push({ role: "user", content: text });
  turn("user").textContent = text;
  get("say").value = "";
  running = new AbortController();
  get("stop").hidden = false;
  get("send").disabled = true;
  try {
    await answer();
  } catch (fault) {
    if (fault.name !== "AbortError") {
      turn("fault").textContent = fault.message;
      if (history.at(-1).role === "user") history.pop();
    }
  } finally {
    running = null;
    get("stop").hidden = true;
    get("send").disabled = false;
    get("say").focus();
  }
});

get("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    get("ask").requestSubmit();
  }
});
get("stop").addEventListener("click", () => running?.abort());
get("clear").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  get("talk").replaceChildren();
});
model().catch(() => {}); // asked again with the first message
