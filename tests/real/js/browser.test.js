// Chromium, with a page of another origin: streams, and every way in which a person leaves.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { createServer } from 'node:http';
import { after, before, describe, test } from 'node:test';

import { chromium } from 'playwright-core';

import { direct, frontUrl, script } from './support.js';

const request = { model: 'fake', messages: [{ role: 'user', content: 'tell me' }], max_tokens: 50, stream: true };

describe('a page in Chromium', { skip: direct }, () => {
  let pages, browser, origin;

  before(async () => {
    pages = createServer((_, answer) => answer.setHeader('content-type', 'text/html').end('<title>page</title>'));
    pages.listen(0, '127.0.0.1');
    await once(pages, 'listening');
    origin = `http://127.0.0.1:${pages.address().port}`;
    browser = await chromium.launch({
      executablePath: '/usr/bin/chromium',
      args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-background-networking'],
    });
  });
  after(async () => {
    await browser.close();
    pages.close();
  });

  async function newPage() {
    const page = await browser.newPage();
    await page.goto(origin);
    return page;
  }

  /** Starts a call in the page; the first bytes have come when this returns. */
  async function open(page, scripted) {
    await page.evaluate(
      async ([url, body]) => {
        const abort = new AbortController();
        const answer = await fetch(`${url}/v1/chat/completions`, {
          method: 'POST',
          headers: { 'content-type': 'application/json', authorization: 'Bearer sk-any' },
          body: JSON.stringify(body),
          signal: abort.signal,
        });
        const reader = answer.body.getReader();
        await reader.read();
        window.call = { abort, reader };
      },
      [frontUrl, { ...request, ...scripted.body }],
    );
  }

  test('reads a stream', async () => {
    const page = await newPage();
    await open(page, script({ tokens: 5, pace_ms: 50 }));
    const rest = await page.evaluate(async () => {
      let text = '';
      for (;;) {
        const { done, value } = await window.call.reader.read();
        if (done) return text;
        text += new TextDecoder().decode(value);
      }
    });
    assert.match(rest, /\[DONE\]\n\n$/);
    await page.close();
  });

  test('sees a broken stream as an error', async () => {
    const page = await newPage();
    await open(page, script({ tokens: 50, pace_ms: 20, end: 'rst', end_at: 8 }));
    const error = await page.evaluate(async () => {
      try {
        while (!(await window.call.reader.read()).done);
        return null;
      } catch (error) {
        return error.message;
      }
    });
    assert.match(error, /network error/);
    await page.close();
  });

  test('reads an error answer and its headers', async () => {
    const page = await newPage();
    const answer = await page.evaluate(
      async ([url, body]) => {
        const answer = await fetch(`${url}/v1/chat/completions`, { method: 'POST', body: JSON.stringify(body) });
        return { status: answer.status, id: answer.headers.get('x-request-id'), body: await answer.json() };
      },
      [frontUrl, { ...request, ...script({ status: 429 }).body }],
    );
    assert.equal(answer.status, 429);
    assert.ok(answer.id);
    assert.ok(answer.body.error.message);
    await page.close();
  });

  const ways = {
    'aborts the fetch': (page) => page.evaluate(() => window.call.abort.abort()),
    'cancels the reader': (page) => page.evaluate(() => window.call.reader.cancel()),
    'goes to another page': (page) => page.goto('about:blank'),
    'closes the tab': (page) => page.close(),
  };
  const calls = {
    'a paced stream': { tokens: 10_000, pace_ms: 20 },
    'a silent stream': { tokens: 50, stall: { at: { event: 5 } } },
  };
  for (const [way, leave] of Object.entries(ways)) {
    for (const [call, fields] of Object.entries(calls)) {
      test(`${way}: ${call} ends at the server`, async () => {
        const page = await newPage();
        const scripted = script(fields);
        await open(page, scripted);
        await leave(page);
        await scripted.left();
        if (!page.isClosed()) await page.close();
      });
    }
  }
});
