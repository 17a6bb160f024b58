// Questions to the daemon, and what it refuses.

/** The daemon that serves this page, also where a proxy serves it below another path. */
const ROOT = new URL("../v1/", document.baseURI);
/** Only this tab has the token, and only as long as it is open. */
const KEY = "ebb.token";
/** Longest wait for an answer to a question. */
const PATIENCE_MS = 15_000;
/** Longest silence on a stream of events: a sign of life comes every 15 s. */
const SILENCE_MS = 40_000;
const TOKEN = /^[A-Za-z0-9\-._~+/=]{32,512}$/;

/** The daemon refuses a request, or fails. */
export class Refused extends Error {
  constructor(status, code, error, hint) {
    super(hint ? `${error}: ${hint}` : error);
    this.status = status;
    this.code = code;
  }

  /** Whether a token is needed, or the one that was shown is not known. */
  get wantsToken() {
    return this.status === 401;
  }
}

/** The daemon does not answer. */
export class Silent extends Error {}

/** The token that is shown with each request. */
export const token = {
  isKnown: () => sessionStorage.getItem(KEY) !== null,
  looksRight: (text) => TOKEN.test(text.trim()),
  keep: (text) => sessionStorage.setItem(KEY, text.trim()),
  forget: () => sessionStorage.removeItem(KEY),
};

async function send(path, options) {
  const headers = new Headers(options.headers);
  const shown = sessionStorage.getItem(KEY);
  if (shown !== null) {
    headers.set("authorization", `Bearer ${shown}`);
  }
  const fixed = { headers, cache: "no-store", credentials: "omit", redirect: "error" };
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { ...options, ...fixed });
  } catch (error) {
    throw new Silent(`no answer from ebbd (${error.message})`);
  }
  if (!answer.ok) {
    throw await refusal(answer);
  }
  return answer;
}

async function refusal(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // Something before the daemon has answered.
  }
  const error = body.error ?? `${answer.status} ${answer.statusText}`.trim();
  return new Refused(answer.status, body.code ?? null, error, body.hint ?? null);
}

async function json(answer) {
  try {
    return await answer.json();
  } catch (error) {
    throw new Silent(`the answer of ebbd ends early (${error.message})`);
  }
}

/** Asks for figures. */
export async function ask(path) {
  return json(await send(path, { signal: AbortSignal.timeout(PATIENCE_MS) }));
}

/** Has something changed. A change may take long, and is not given up. */
export async function change(path, body, method = "PUT") {
  const headers = { "content-type": "application/json" };
  return json(await send(path, { method, headers, body: JSON.stringify(body) }));
}

/** The path of what belongs to a VM. */
export function ofVm(name, what = "") {
  return `vms/${encodeURIComponent(name)}${what && `/${what}`}`;
}

/** The events after a number, and then those that happen. Ends with the connection. */
export async function* events(since) {
  const silence = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("no sign of life")), SILENCE_MS);
  };
  heard();
  try {
    const query = since === null ? "" : `?since=${since}`;
    const answer = await send(`events${query}`, { signal: silence.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      heard();
      text += value;
      const frames = text.split("\n\n");
      text = frames.pop();
      yield* frames.map(eventOf).filter((event) => event !== null);
    }
  } finally {
    clearTimeout(timer);
    silence.abort();
  }
}

function eventOf(frame) {
  const lines = frame.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? JSON.parse(lines.map((line) => line.slice(5)).join("\n")) : null;
}
