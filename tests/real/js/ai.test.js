import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

import { ENDLESS, counted, url, work } from './support.js';

const model = (options = {}) =>
  createOpenAICompatible({ name: 'tidegate', baseURL: `${url}/v1`, apiKey: 'sk-any', includeUsage: true, ...options })('tiny');
const prompt = 'tell me';

test('a stream has the text of the whole answer, and usage', async () => {
  const request = { model: model(), prompt, maxOutputTokens: 16, temperature: 0, seed: 7 };
  const whole = await generateText(request);
  const stream = streamText(request);
  let text = '';
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, 16);
  assert.equal(await stream.finishReason, 'length');
});

test('an error before the stream', async () => {
  const { fetch, statuses } = counted();
  const parts = [];
  const stream = streamText({ model: model({ fetch }), prompt: 'word '.repeat(60_000), onError() {} });
  for await (const part of stream.fullStream) parts.push(part);
  const { error } = parts.find(({ type }) => type === 'error');
  assert.match(error.message, /context size/);
  assert.equal(error.statusCode, 400);
  assert.deepEqual(statuses, [400]);
});

test('a stream is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const stream = streamText({ model: model(), prompt, maxOutputTokens: ENDLESS, abortSignal: abort.signal, onError() {} });
  const types = [];
  for await (const { type } of stream.fullStream) {
    types.push(type);
    if (type === 'text-delta') abort.abort();
  }
  assert.equal(types.at(-1), 'abort');
  await task.stopped();
});

test('a whole answer is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const answer = generateText({ model: model(), prompt, maxOutputTokens: ENDLESS, abortSignal: abort.signal });
  await Promise.all([
    assert.rejects(answer, { name: 'AbortError' }),
    task.started().then(() => abort.abort()),
  ]);
  await task.stopped();
});

test('a plain fetch is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: 'tiny', messages: [{ role: 'user', content: prompt }], max_tokens: ENDLESS, stream: true }),
    signal: abort.signal,
  });
  const reader = answer.body.getReader();
  await reader.read();
  abort.abort();
  await assert.rejects(reader.read(), { name: 'AbortError' });
  await task.stopped();
});
