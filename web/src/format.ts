// Numbers, units and times as people read them. Pure.

export type Unit = 'bytes' | 'seconds' | 'fraction' | 'plain';

/** The unit that ends a metric's name (`time/step_s`), or the part before what it is of (`memory/parameters_bytes/float32`). */
export function unitOf(metric: string): Unit {
  for (const part of [metric, metric.split('/')[1] ?? '']) {
    if (/_bytes$/.test(part)) return 'bytes';
    if (/_s$/.test(part)) return 'seconds';
    if (/(_fraction|_ratio)$/.test(part)) return 'fraction';
  }
  return 'plain';
}

const SI = [['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3]] as const;
const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] as const;

const trim = (text: string): string => (text.includes('.') ? text.replace(/\.?0+$/, '') : text);

/** At most `digits` significant digits, no trailing zeros: 0.6012, 65,536, 3.2e-7. */
export function formatNumber(value: number, digits = 5): string {
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '+Inf' : '−Inf';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, 'e').replace('e+', 'e');
  if (Number.isInteger(value)) return value.toLocaleString('en-US');
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString('en-US', { maximumFractionDigits: decimals });
}

export function formatBytes(value: number, digits = 4): string {
  if (!Number.isFinite(value)) return formatNumber(value);
  const power = Math.min(BYTES.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, Math.abs(value))) / 10)));
  return `${trim((value / 1024 ** power).toPrecision(digits))} ${BYTES[power]}`;
}

export function formatSeconds(value: number, digits = 4): string {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return formatNumber(value);
  if (size === 0) return '0 s';
  if (size < 1e-3) return `${trim((value * 1e6).toPrecision(digits))} µs`;
  if (size < 1) return `${trim((value * 1e3).toPrecision(digits))} ms`;
  return `${formatNumber(value, digits)} s`;
}

export function formatValue(value: number | null | undefined, unit: Unit): string {
  if (value === null || value === undefined) return '–';
  if (unit === 'bytes') return formatBytes(value);
  if (unit === 'seconds') return formatSeconds(value);
  if (unit === 'fraction' && Number.isFinite(value)) return `${formatNumber(value * 100, 4)} %`;
  return formatNumber(value);
}

/** Short form for an axis: 65k, 1.5M, 3e-5, 512 MiB. */
export function formatTick(value: number, unit: Unit): string {
  if (value === 0) return '0';
  if (unit === 'bytes') return formatBytes(value, 3);
  if (unit === 'seconds') return formatSeconds(value, 3);
  if (unit === 'fraction') return `${formatNumber(value * 100, 3)}%`;
  const size = Math.abs(value);
  for (const [letter, factor] of SI) {
    if (size >= factor && size < 1e15) return `${trim((value / factor).toPrecision(4))}${letter}`;
  }
  if (size < 1e-3 || size >= 1e15) return value.toExponential(1).replace('.0e', 'e').replace('e+', 'e');
  return trim(value.toPrecision(4));
}

export const formatStep = (step: number): string => step.toLocaleString('en-US');

/** 42 s, 3 m 12 s, 5 h 03 m, 2 d 4 h. */
export function formatDuration(seconds: number): string {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(s % 60).padStart(2, '0')} s`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, '0')} m`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

/** "just now", "4 min ago", "3 h ago", then a date. */
export function formatAgo(timeS: number, nowS: number): string {
  const s = nowS - timeS;
  if (s < 45) return 'just now';
  if (s < 3600) return `${Math.max(1, Math.round(s / 60))} min ago`;
  if (s < 86_400) return `${Math.round(s / 3600)} h ago`;
  return new Date(timeS * 1000).toISOString().slice(0, 10);
}
