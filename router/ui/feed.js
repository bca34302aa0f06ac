// The router's events, over fetch: an EventSource could not send a key. Comes back by itself, a little later each time.

const KEY = "pdserve.key";
const SILENCE_MS = 6000; // the router says something twice a second
const LATEST_MS = 5000; // between two tries

export const signedIn = () => sessionStorage.getItem(KEY) !== null;
export const signOut = () => sessionStorage.removeItem(KEY);
export const signIn = (key) => sessionStorage.setItem(KEY, key);

/** What the router answers; an error of its own becomes an Error with `status` and its words. */
export async function ask(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "same-origin" });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw Object.assign(new Error(told.error?.message ?? `the router answered ${response.status}`), { status: response.status });
}

/** Calls on.event(name, data), on.lost(error, milliseconds until the next try), on.refused(error). Never returns, but after a refusal. */
export async function follow(on) {
  for (let wait = 500; ; wait = Math.min(2 * wait, LATEST_MS)) {
    const quiet = new AbortController();
    let timer = setTimeout(() => quiet.abort(), SILENCE_MS);
    try {
      const response = await ask("events", quiet.signal);
      for await (const [name, data] of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => quiet.abort(), SILENCE_MS);
        wait = 500;
        on.event(name, data);
      }
      throw new Error("the router has closed the connection");
    } catch (error) {
      if (error.status === 401 || error.status === 403) return on.refused(error);
      on.lost(error, wait);
    } finally {
      clearTimeout(timer);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const block of whole) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/s.exec(block) ?? [];
        if (name) yield [name, JSON.parse(data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}
