// Puts Plotly's module factory in parentheses: two characters, and V8 compiles the 1.5 MB once instead of twice.

const HEAD = 'self : this, () => {';
const TAIL = '\n}));';

/** The published bundle with its factory parenthesised. Throws if the file no longer looks as expected. */
export function parenthesise(source) {
  const open = source.indexOf(HEAD);
  const close = source.lastIndexOf(TAIL);
  if (open < 0 || source.slice(close).trim() !== TAIL.trim()) {
    throw new Error('plotly.js no longer starts and ends as plotly-patch.mjs expects: look at the file, then adapt HEAD and TAIL');
  }
  const at = open + HEAD.indexOf('() =>');
  return `${source.slice(0, at)}(${source.slice(at, close)}\n})${source.slice(close + 2)}`;
}
