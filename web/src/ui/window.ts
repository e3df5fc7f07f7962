// Which rows of a long list are on the screen. Pure.

const SPARE_ROWS = 12;

/** Rows [first, last) for a list whose top is `top` pixels above the screen's top edge. */
export function windowOf(top: number, height: number, rowPx: number): { first: number; last: number } {
  const first = Math.max(0, Math.floor(top / rowPx) - SPARE_ROWS);
  return { first, last: Math.max(first, Math.ceil((top + height) / rowPx) + SPARE_ROWS) };
}
