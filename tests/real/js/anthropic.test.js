import assert from 'node:assert/strict';
import { test } from 'node:test';

import Anthropic, { APIUserAbortError, BadRequestError } from '@anthropic-ai/sdk';

import { ENDLESS, counted, direct, url, work } from './support.js';

const messages = [{ role: 'user', content: 'tell me' }];
const short = { model: 'tiny', messages, max_tokens: 16 };
const endless = { model: 'tiny', messages, max_tokens: ENDLESS };
const maxRetries = direct ? 2 : 0;
const client = (options = {}) => new Anthropic({ baseURL: url, apiKey: 'sk-any', maxRetries, ...options });

test('a whole answer', async () => {
  const answer = await client().messages.create(short);
  assert.equal(answer.usage.output_tokens, 16);
  assert.equal(answer.content[0].type, 'text');
});

test('the helper has the final message', async () => {
  const stream = client().messages.stream(short);
  let text = '';
  stream.on('text', (delta) => (text += delta));
  const answer = await stream.finalMessage();
  assert.equal(text, answer.content[0].text);
  assert.equal(answer.usage.output_tokens, 16);
});

test('tokens are counted', async () => {
  const { input_tokens: tokens } = await client().messages.countTokens({ model: 'tiny', messages });
  assert.ok(tokens > 0);
});

test('an error before the stream', async () => {
  const { fetch, statuses } = counted();
  const request = { ...endless, messages: [{ role: 'user', content: 'word '.repeat(60_000) }], stream: true };
  await assert.rejects(client({ fetch, maxRetries: 2 }).messages.create(request), BadRequestError);
  assert.deepEqual(statuses, [400]);
});

test('a request id', { skip: direct }, async () => {
  const answer = await client().messages.create(short);
  assert.ok(answer._request_id);
});

test('a raw stream is left by break', async () => {
  const task = work();
  for await (const event of await client().messages.create({ ...endless, stream: true })) {
    if (event.type === 'content_block_delta') break;
  }
  await task.stopped();
});

test('a raw stream is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const stream = await client().messages.create({ ...endless, stream: true }, { signal: abort.signal });
  for await (const _ of stream) abort.abort();
  await task.stopped();
});

test('a helper is left by abort', async () => {
  const task = work();
  const stream = client().messages.stream(endless);
  stream.once('text', () => stream.abort());
  await assert.rejects(stream.done(), APIUserAbortError);
  await task.stopped();
});

test('a whole answer is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const answer = client().messages.create(endless, { signal: abort.signal, timeout: 60_000 });
  await task.started();
  abort.abort();
  await assert.rejects(answer, APIUserAbortError);
  await task.stopped();
});
