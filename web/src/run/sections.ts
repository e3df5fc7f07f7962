// Which charts stand under which heading. Pure.
import type { Metric } from '../api.ts';

const ORDER = ['train', 'grad', 'scaler', 'memory', 'time', 'agent'] as const;

export interface Section { name: string; metrics: string[] }

const place = (name: string): number => {
  const at = (ORDER as readonly string[]).indexOf(name);
  if (at >= 0) return at;
  return name === 'other' ? ORDER.length + 1 : ORDER.length;
};

const collator = new Intl.Collator('en', { numeric: true });

/** Loss first, then by name; numbers inside names count as numbers. */
function byName(a: string, b: string): number {
  const first = (name: string): number => (/(^|\/)loss$/.test(name) ? 0 : 1);
  return first(a) - first(b) || collator.compare(a, b);
}

/** Sections in the fixed order, others after them by name; a lone chart without a known section goes to "other". */
export function sectionsOf(metrics: readonly Metric[], filter = ''): Section[] {
  const wanted = filter.trim().toLowerCase();
  const groups = new Map<string, string[]>();
  for (const metric of metrics) {
    if (metric.kind !== 'scalar' || !metric.name.toLowerCase().includes(wanted)) continue;
    const slash = metric.name.indexOf('/');
    const name = slash > 0 ? metric.name.slice(0, slash) : 'other';
    const group = groups.get(name);
    if (group) group.push(metric.name);
    else groups.set(name, [metric.name]);
  }
  const lone: string[] = [];
  for (const [name, list] of groups) {
    if (list.length > 1 || name === 'other' || (ORDER as readonly string[]).includes(name)) continue;
    groups.delete(name);
    lone.push(...list);
  }
  if (lone.length) groups.set('other', [...(groups.get('other') ?? []), ...lone]);
  return [...groups].map(([name, list]) => ({ name, metrics: list.sort(byName) })).sort((a, b) => place(a.name) - place(b.name) || collator.compare(a.name, b.name));
}
