// The REST contract as types, and one function per route. A float that is not finite travels as a string.
import type { Points } from './charts/series.ts';

export type RunState = 'running' | 'finished' | 'failed' | 'crashed' | 'lost';
export type Severity = 'info' | 'warning' | 'error' | 'critical';
export type WireFloat = number | 'NaN' | 'Infinity' | '-Infinity' | null;

export interface Run {
  id: string;
  project: string;
  name: string;
  state: RunState;
  created_s: number;
  updated_s: number;
  finished_s: number | null;
  attempts: number;
  world_size: number;
  last_step: number | null;
  tags: string[];
  notes: string;
  group: string | null;
  exit: { code: number | null; signal: string | null; reason: string | null; inferred: boolean; exception: string | null } | null;
  latest: Record<string, WireFloat>;
  alerts: { firing: number; total: number };
  rejected_records: number;
  dropped_reports: number;
}

export interface RunDetail extends Run {
  config: Record<string, unknown>;
  sources: Record<string, unknown>[];
  unavailable: Record<string, string>;
  dumps?: { step: number; attempt: number; rank: number; host: string; path: string; reason: string; num_bytes: number; saved_s: number }[];
}

export interface Metric {
  name: string;
  section: string;
  kind: 'scalar' | 'layer';
  num_points: number;
  first_step: number | null;
  last_step: number | null;
  last: WireFloat;
  num_nonfinite: number;
}

export interface Alert {
  id: string;
  run: string;
  attempt: number;
  rule: string;
  severity: Severity;
  state: 'firing' | 'resolved';
  metric: string;
  title: string;
  explanation: string;
  advice: string;
  first_step: number;
  last_step: number;
  opened_s: number;
  resolved_s: number | null;
  resolved_step: number | null;
  count: number;
  value: WireFloat;
  worst_value: WireFloat;
  baseline: WireFloat;
  threshold: WireFloat;
  layer: string | null;
  layers: string[];
  num_layers: number;
  rank: number | null;
  ranks: number[];
  facts: string[];
}

export interface SeriesAnswer {
  metric: string;
  bucket_width: number;
  first_step: number | null;
  last_step: number | null;
  points: Points;
  error?: string;
}

export interface LayersAnswer {
  statistic: string;
  layers: string[];
  bucket_width: number;
  steps: number[];
  values: WireFloat[][];
  nonfinite: [number, number, number][];
  first_step: number | null;
  last_step: number | null;
}

export interface FlowAnswer {
  step: number | null;
  layers: string[];
  statistics: Record<string, WireFloat[]>;
  /** The step that a statistic's values are of: norms are read in every step, others perhaps less often. */
  measured_at: Record<string, number | null>;
}

/** An answer that was not 2xx, with what the server said about it. */
export class ApiError extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

/** NaN for null: to a chart, absent and not-a-number are both a hole. */
export const toNumber = (value: WireFloat | undefined): number => (value === null || value === undefined ? NaN : Number(value));

/** null only for what is absent; "NaN" and the infinities become floats. */
export const toValue = (value: WireFloat | undefined): number | null => (value === null || value === undefined ? null : Number(value));

const url = (path: string): string => new URL(`api/v1/${path}`, document.baseURI).href;
const runPath = (run: string): string => `runs/${encodeURIComponent(run)}`;

/** The server answers `./` with its sign-in form when the cookie is missing. Once in ten seconds: never a reload loop. */
function signIn(): void {
  const last = Number(sessionStorage.getItem('signed-out-at') ?? 0);
  if (Date.now() - last < 10_000) return;
  sessionStorage.setItem('signed-out-at', String(Date.now()));
  location.assign(new URL('./', document.baseURI).href);
}

async function failure(response: Response): Promise<ApiError> {
  const body = await response.json().catch(() => null) as { detail?: unknown; title?: unknown; remedy?: unknown } | null;
  const said = [body?.detail ?? body?.title, body?.remedy].filter((part): part is string => typeof part === 'string' && part !== '');
  return new ApiError(response.status, said.join(' ') || `the server answered ${response.status}`);
}

async function ask<T>(path: string, init: RequestInit = {}): Promise<T> {
  const response = await fetch(url(path), { credentials: 'same-origin', ...init });
  if (response.status === 401) signIn();
  if (!response.ok) throw await failure(response);
  return await response.json() as T;
}

export interface RunsPage { runs: Run[]; next_cursor: string | null }
export interface RunsQuery { search?: string; state?: string; cursor?: string | null; limit?: number }

export function listRuns(query: RunsQuery, signal?: AbortSignal): Promise<RunsPage> {
  const params = new URLSearchParams({ limit: String(query.limit ?? 100) });
  for (const name of ['search', 'state', 'cursor'] as const) if (query[name]) params.set(name, query[name]);
  return ask(`runs?${params}`, { signal: signal ?? null });
}

export const getRun = (run: string): Promise<RunDetail> => ask(runPath(run));
export const getMetrics = async (run: string): Promise<Metric[]> => (await ask<{ metrics: Metric[] }>(`${runPath(run)}/metrics`)).metrics;

export async function getAlerts(run: string): Promise<Alert[]> {
  return (await ask<{ alerts: Alert[] }>(`${runPath(run)}/alerts`)).alerts;
}

type WireSeries = Omit<SeriesAnswer, 'points'> & { points?: { [column in keyof Points]?: WireFloat[] } | null };

function decodeSeries(wire: WireSeries): SeriesAnswer {
  const column = (name: keyof Points): number[] => (wire.points?.[name] ?? []).map(toNumber);
  const points: Points = {
    step: column('step'), count: column('count'), mean: column('mean'), min: column('min'), max: column('max'),
    nan: column('nan'), pos_inf: column('pos_inf'), neg_inf: column('neg_inf'),
  };
  return { ...wire, bucket_width: wire.bucket_width || 1, points };
}

export async function querySeries(run: string, metrics: string[], range: readonly [number | null, number | null], buckets: number): Promise<SeriesAnswer[]> {
  const [from, to] = range;
  const body = { series: metrics.map((metric) => ({ run, metric })), ...(from === null ? {} : { from }), ...(to === null ? {} : { to }), buckets };
  const answer = await ask<{ series: WireSeries[] }>('series/query', { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } });
  return answer.series.map(decodeSeries);
}

export function getLayers(run: string, statistic: string, range: readonly [number | null, number | null], columns: number, signal?: AbortSignal): Promise<LayersAnswer> {
  const params = new URLSearchParams({ statistic, columns: String(columns) });
  if (range[0] !== null) params.set('from', String(range[0]));
  if (range[1] !== null) params.set('to', String(range[1]));
  return ask(`${runPath(run)}/layers?${params}`, { signal: signal ?? null });
}

export function getFlow(run: string, step: number | null, signal?: AbortSignal): Promise<FlowAnswer> {
  return ask(`${runPath(run)}/layers/flow${step === null ? '' : `?step=${step}`}`, { signal: signal ?? null });
}
