// The servers, and what they say about their work.

import { readFileSync } from 'node:fs';
import { setTimeout as pause } from 'node:timers/promises';
import { randomUUID } from 'node:crypto';

/** The gateway in front of llama.cpp, or llama.cpp itself. */
export const url = process.env.TIDEGATE_URL;
export const direct = url === process.env.LLAMA_URL;
/** The gateway in front of the scripted server. */
export const frontUrl = process.env.TIDEGATE_FAKE_URL;

/** More tokens than any test lets llama.cpp write. */
export const ENDLESS = 20_000;

export async function until(condition, within, what) {
  for (const deadline = performance.now() + within; ; await pause(10)) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > deadline) throw new Error(`not within ${within} ms: ${what}`);
  }
}

/** A fetch that counts. */
export function counted() {
  const statuses = [];
  const fetch = async (...request) => {
    const answer = await globalThis.fetch(...request);
    statuses.push(answer.status);
    return answer;
  };
  return { fetch, statuses };
}

// --- llama.cpp: its log. Asking the server itself would keep it from noticing that a client has gone.

const LAUNCH = /launch_slot_: id +\d+ \| task (\d+) \| processing task/g;
const RELEASE = /release: id +\d+ \| task (\d+) \| stop processing: n_tokens = (\d+)/g;

const log = () => readFileSync(process.env.LLAMA_LOG, 'utf8');

/** Tasks that are launched from now on. */
export function work() {
  const before = new Set([...log().matchAll(LAUNCH)].map(([, task]) => task));
  const fresh = (pattern) => [...log().matchAll(pattern)].filter(([, task]) => !before.has(task));
  return {
    launched: () => fresh(LAUNCH).length,
    async started() {
      await until(() => fresh(LAUNCH).length > 0, 10_000, 'llama.cpp starts the call');
    },
    /** The call ended far from its end: not by itself. */
    async stopped() {
      await until(() => fresh(RELEASE).length > 0, 3_000, 'llama.cpp stops the call');
      for (const [, , tokens] of fresh(RELEASE)) {
        if (Number(tokens) > ENDLESS / 2) throw new Error(`ran on to ${tokens} tokens`);
      }
    },
  };
}

// --- the scripted server

/** What the server does with one call: put `body` into the request. */
export function script(fields) {
  const id = randomUUID();
  const calls = async () => {
    const all = await (await fetch(`${process.env.FAKE_URL}/__rig/calls`)).json();
    return all.filter((call) => call.test_id === id);
  };
  const wait = (what, condition, within) => until(async () => (await calls()).find(condition), within, what);
  return {
    body: { rig: { id, ...fields } },
    calls,
    begun: () => wait('the call arrives', (call) => call.body_ns, 5_000),
    left: () => wait('the work stops', (call) => ['peer_fin', 'peer_rst'].includes(call.ended), 2_000),
  };
}
