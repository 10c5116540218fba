import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI, { APIConnectionTimeoutError, APIUserAbortError, BadRequestError } from 'openai';

import { ENDLESS, counted, direct, url, work } from './support.js';

const messages = [{ role: 'user', content: 'tell me' }];
const steady = { model: 'tiny', messages, temperature: 0, seed: 7, cache_prompt: false };
const endless = { model: 'tiny', messages, max_tokens: ENDLESS };
// llama.cpp itself closes connections that it announced to keep: there the SDK's retries are needed.
const maxRetries = direct ? 2 : 0;
const client = (options = {}) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'sk-any', maxRetries, ...options });

const weather = {
  type: 'function',
  function: {
    name: 'weather',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string', enum: ['Oslo', 'Rome'] } },
      required: ['city'],
    },
  },
};

async function streamed(openai, request) {
  let text = '';
  for await (const chunk of await openai.chat.completions.create({ ...request, stream: true })) {
    text += chunk.choices[0].delta.content ?? '';
  }
  return text;
}

test('a stream has the text of the whole answer', async () => {
  const request = { ...steady, max_tokens: 32 };
  const whole = await client().chat.completions.create(request);
  assert.equal(await streamed(client(), request), whole.choices[0].message.content);
  assert.equal(whole.usage.completion_tokens, 32);
});

test('usage comes when it is asked for', async () => {
  const request = { ...steady, max_tokens: 8, stream: true, stream_options: { include_usage: true } };
  const chunks = [];
  for await (const chunk of await client().chat.completions.create(request)) chunks.push(chunk);
  assert.equal(chunks.at(-1).usage.completion_tokens, 8);
});

test('the helper puts tool calls together', async () => {
  const request = { ...steady, max_tokens: 120, tools: [weather], tool_choice: 'required', logit_bias: [[3, 100]] };
  const calls = [];
  const stream = client().chat.completions.stream(request);
  stream.on('tool_calls.function.arguments.done', (call) => calls.push(call));
  for await (const _ of stream);
  assert.equal(calls[0].name, 'weather');
  assert.deepEqual(JSON.parse(calls[0].arguments), { city: 'Rome' });
});

test('responses', async () => {
  const request = { model: 'tiny', input: 'tell me', max_output_tokens: 16, temperature: 0 };
  const whole = await client().responses.create(request);
  let text = '';
  for await (const event of await client().responses.create({ ...request, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta;
  }
  assert.equal(text, whole.output_text);
});

test('completions, embeddings, models', async () => {
  const openai = client();
  const completion = await openai.completions.create({ model: 'tiny', prompt: 'tell', max_tokens: 4 });
  assert.equal(completion.usage.completion_tokens, 4);
  const embeddings = await openai.embeddings.create({ model: 'tiny', input: 'hello' });
  assert.equal(embeddings.data[0].embedding.length, 64);
  const models = await openai.models.list();
  assert.ok(models.data.some(({ id }) => id === 'tiny'));
});

test('an error before the stream', async () => {
  const { fetch, statuses } = counted();
  const request = { ...endless, messages: [{ role: 'user', content: 'word '.repeat(60_000) }], stream: true };
  await assert.rejects(client({ fetch, maxRetries: 2 }).chat.completions.create(request), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.match(error.message, /context size/);
    return true;
  });
  assert.deepEqual(statuses, [400]);
});

test('a request id', { skip: direct }, async () => {
  const answer = await client().chat.completions.create({ ...steady, max_tokens: 1 });
  assert.ok(answer._request_id);
});

const leave = {
  break: async (stream) => {
    for await (const _ of stream) break;
  },
  'the controller': async (stream) => {
    for await (const _ of stream) stream.controller.abort();
  },
  throw: async (stream) => {
    await assert.rejects(async () => {
      for await (const _ of stream) throw new Error('mine');
    }, /mine/);
  },
};

for (const [way, leaving] of Object.entries(leave)) {
  test(`a stream is left by ${way}`, async () => {
    const task = work();
    await leaving(await client().chat.completions.create({ ...endless, stream: true }));
    await task.stopped();
  });
}

test('a stream is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const stream = await client().chat.completions.create({ ...endless, stream: true }, { signal: abort.signal });
  for await (const _ of stream) abort.abort();
  await task.stopped();
});

test('a helper is left by abort', async () => {
  const task = work();
  const stream = client().chat.completions.stream(endless);
  stream.once('content', () => stream.abort());
  await assert.rejects(stream.done(), APIUserAbortError);
  await task.stopped();
});

test('a responses stream is left by break', async () => {
  const task = work();
  const request = { model: 'tiny', input: 'tell me', max_output_tokens: ENDLESS, stream: true };
  for await (const event of await client().responses.create(request)) {
    if (event.type === 'response.output_text.delta') break;
  }
  await task.stopped();
});

test('a whole answer is left by a signal', async () => {
  const task = work();
  const abort = new AbortController();
  const answer = client().chat.completions.create(endless, { signal: abort.signal });
  await task.started();
  abort.abort();
  await assert.rejects(answer, APIUserAbortError);
  await task.stopped();
});

test('a whole answer is left by the timeout', async () => {
  const task = work();
  await assert.rejects(client({ timeout: 800, maxRetries: 0 }).chat.completions.create(endless), APIConnectionTimeoutError);
  await task.stopped();
});
