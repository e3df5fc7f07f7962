// Pathname -> page, under any prefix. `<base>` (set in index.html) says where the prefix ends.
import { signal } from '@preact/signals';
import type { Range } from './charts/axis.ts';

export type Route = { page: 'runs' } | { page: 'run'; run: string } | { page: 'missing'; path: string };

const prefix = (): string => new URL('./', document.baseURI).pathname;

export function parseRoute(pathname: string, base: string): Route {
  const path = pathname.startsWith(base) ? pathname.slice(base.length) : pathname.replace(/^\//, '');
  if (path === '' || path === 'runs' || path === 'runs/' || path === 'index.html') return { page: 'runs' };
  const run = /^runs\/(.+?)\/?$/.exec(path)?.[1];
  try {
    return run ? { page: 'run', run: decodeURIComponent(run) } : { page: 'missing', path };
  } catch {
    return { page: 'missing', path };
  }
}

export const route = signal<Route>(parseRoute(location.pathname, prefix()));
addEventListener('popstate', () => { route.value = parseRoute(location.pathname, prefix()); });

export const runHref = (run: string): string => `${prefix()}runs/${encodeURIComponent(run)}`;
export const runsHref = (): string => prefix();

export function go(href: string): void {
  history.pushState(null, '', href);
  route.value = parseRoute(location.pathname, prefix());
  scrollTo(0, 0);
}

/** For links: a plain click stays in the page, anything else is the browser's. */
export function followLink(event: MouseEvent & { currentTarget: HTMLAnchorElement }): void {
  if (event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  go(event.currentTarget.href);
}

export function rangeFromUrl(): Range | null {
  const params = new URLSearchParams(location.search);
  const [from, to] = [Number(params.get('from') ?? NaN), Number(params.get('to') ?? NaN)];
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? [from, to] : null;
}

export function rangeToUrl(range: Range | null): void {
  // The whole path: a bare "?..." would be resolved against the base.
  history.replaceState(null, '', location.pathname + (range ? `?from=${range[0]}&to=${range[1]}` : ''));
}
