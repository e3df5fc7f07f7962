import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { describe, it } from 'node:test';
import { pathToFileURL } from 'node:url';

const { parenthesise } = await import(pathToFileURL(`${process.cwd()}/plotly-patch.mjs`).href) as { parenthesise(source: string): string };
const source = readFileSync(createRequire(`${process.cwd()}/package.json`).resolve('plotly.js-cartesian-dist-min'), 'utf8');

describe('the copy of Plotly', () => {
  it('differs from the published file by two parentheses and nothing else', () => {
    const copy = parenthesise(source);
    assert.equal(copy.length, source.length + 2);
    let at = 0;
    while (copy[at] === source[at]) at++;
    assert.equal(copy[at], '(');
    let end = 1;
    while (copy.at(-end) === source.at(-end)) end++;
    const close = copy.length - end;
    assert.equal(copy[close], ')');
    // Between the two, every character is the published one, shifted by one place.
    assert.equal(copy.slice(at + 1, close), source.slice(at, close - 1));
  });

  it('is refused when the published file looks different', () => {
    assert.throws(() => parenthesise('(function(){})()'), /plotly-patch/);
    assert.throws(() => parenthesise(`${source}\nmore();`), /plotly-patch/);
  });
});
