// What breaks after the first byte is an exception in every SDK, and what is silent can be left.

import assert from 'node:assert/strict';
import { describe, test } from 'node:test';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import { streamText } from 'ai';
import OpenAI from 'openai';

import { counted, direct, frontUrl, script } from './support.js';

const messages = [{ role: 'user', content: 'tell me' }];
const request = { model: 'fake', messages, max_tokens: 50 };

const openai = (options) => new OpenAI({ baseURL: `${frontUrl}/v1`, apiKey: 'sk-any', ...options });
const anthropic = (options) => new Anthropic({ baseURL: frontUrl, apiKey: 'sk-any', ...options });
const ai = ({ body }) =>
  createOpenAICompatible({
    name: 'tidegate',
    baseURL: `${frontUrl}/v1`,
    apiKey: 'sk-any',
    transformRequestBody: (own) => ({ ...own, ...body }),
  })('fake');

async function drain(stream) {
  for await (const _ of stream);
}

/** SDK → reads a scripted stream to its end; an `AbortSignal` may end it before. */
const readers = {
  'openai chat': async ({ body }, signal) =>
    drain(await openai().chat.completions.create({ ...request, ...body, stream: true }, { signal })),
  'openai helper': async ({ body }, signal) => {
    const stream = openai().chat.completions.stream({ ...request, ...body }, { signal });
    await stream.finalChatCompletion();
  },
  'openai responses': async ({ body }, signal) =>
    drain(await openai().responses.create({ model: 'fake', input: 'tell', ...body, stream: true }, { signal })),
  'anthropic raw': async ({ body }, signal) =>
    drain(await anthropic().messages.create({ ...request, ...body, stream: true }, { signal })),
  'anthropic helper': async ({ body }, signal) => {
    await anthropic().messages.stream({ ...request, ...body }, { signal }).finalMessage();
  },
  'ai streamText': async (scripted, signal) => {
    const stream = streamText({ model: ai(scripted), prompt: 'tell', abortSignal: signal, maxRetries: 0, onError() {} });
    for await (const part of stream.fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'abort') throw new Error('aborted');
    }
  },
};

const breaks = {
  FIN: { end: 'fin', end_at: 5 },
  RST: { end: 'rst', end_at: 5 },
  'FIN inside an event': { end: 'fin', end_at: 5, end_mid_event: true },
  'clean end before the terminal event': { end: 'clean', end_at: 5 },
};
/** What the server sends before its error event, in events, with that event. */
const errorEvents = {
  'openai chat': 4,
  'openai helper': 4,
  'openai responses': 7,
  'anthropic raw': 6,
  'anthropic helper': 6,
  'ai streamText': 4,
};
const silences = {
  'before the head': { delay_ms: 60_000 },
  'before the first event': { first_ms: 60_000 },
  'in mid-stream': { stall: { at: { event: 5 } } },
  'between tokens': { tokens: 10_000, pace_ms: 20 },
};
const oddities = {
  CRLF: { line_end: 'crlf' },
  'a line separator in the text': { token_text: 'a\u2028b ' },
  'a server that keeps its connection open': { end: 'hang' },
  comments: { comment: ': thinking\n\n' },
  'byte by byte': { segment: 'byte' },
};

describe('through the gateway, a scripted server', { skip: direct }, () => {
  for (const [name, read] of Object.entries(readers)) {
    test(`${name}: a healthy stream`, () => read(script({ tokens: 5 })));

    for (const [odd, fields] of Object.entries(oddities)) {
      test(`${name}: odd but whole, ${odd}`, { timeout: 10_000 }, () => read(script({ tokens: 5, ...fields })));
    }

    for (const [broken, fields] of Object.entries(breaks)) {
      test(`${name}: ${broken} is an exception`, async () => {
        const scripted = script({ tokens: 50, ...fields });
        await assert.rejects(read(scripted));
        assert.equal((await scripted.calls()).length, 1, 'never tried again');
      });
    }

    test(`${name}: the server's error event is an exception`, async () => {
      const scripted = script({ tokens: 50, error_at: 2, end: 'clean', end_at: errorEvents[name] });
      await assert.rejects(read(scripted));
    });

    for (const [silent, fields] of Object.entries(silences)) {
      test(`${name}: left ${silent}`, async () => {
        const scripted = script({ tokens: 50, ...fields });
        const abort = new AbortController();
        const reading = read(scripted, abort.signal).catch(() => 'some throw, some just end');
        await scripted.begun();
        abort.abort();
        await reading;
        const { tokens_after_peer_left: wasted } = await scripted.left();
        assert.ok(wasted <= 1);
      });
    }
  }

  test('openai: retries are counted', async () => {
    const { fetch, statuses } = counted();
    const scripted = script({ tokens: 3, attempts: [{ status: 429, retry_after: '1' }, { status: 200 }] });
    await drain(await openai({ fetch }).chat.completions.create({ ...request, ...scripted.body, stream: true }));
    assert.deepEqual(statuses, [429, 200]);
    assert.equal((await scripted.calls()).length, 2);
  });

  test('anthropic: retries are counted', async () => {
    const { fetch, statuses } = counted();
    const scripted = script({ tokens: 3, attempts: [{ status: 529, retry_after: '1' }, { status: 200 }] });
    await anthropic({ fetch }).messages.create({ ...request, ...scripted.body });
    assert.deepEqual(statuses, [529, 200]);
    assert.equal((await scripted.calls()).length, 2);
  });
});
