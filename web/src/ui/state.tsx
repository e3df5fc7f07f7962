// A run's state and an alert's severity: always a shape and a word, never a colour alone.
import type { RunState, Severity } from '../api.ts';

const SHAPES: Record<RunState, { tone: string; path: string }> = {
  running: { tone: 'accent', path: 'M6 1.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9Z' },
  finished: { tone: 'ok', path: 'M2 6.4 4.8 9 10 3' },
  failed: { tone: 'bad', path: 'M2.5 2.5l7 7M9.5 2.5l-7 7' },
  crashed: { tone: 'bad', path: 'M6.8 1 2.6 6.8H6L5 11l4.4-6H6Z' },
  lost: { tone: 'warn', path: 'M6 1.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM6 3.6V6l1.8 1.2' },
};

export function StateBadge({ state }: { state: RunState }) {
  const { tone, path } = SHAPES[state] ?? SHAPES.lost;
  return (
    <span class={`badge ${tone} state-${state}`}>
      <svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true" fill={state === 'running' || state === 'crashed' ? 'currentColor' : 'none'} stroke="currentColor" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round"><path d={path} /></svg>
      {state}
    </span>
  );
}

export const severityTone = (severity: Severity): 'accent' | 'warn' | 'bad' => (severity === 'info' ? 'accent' : severity === 'warning' ? 'warn' : 'bad');

const GLYPHS: Record<Severity, string> = { info: 'i', warning: '!', error: '!', critical: '‼' };

export function SeverityBadge({ severity }: { severity: Severity }) {
  return <span class={`badge solid ${severityTone(severity)}`}><span aria-hidden="true">{GLYPHS[severity] ?? '!'}</span> {severity}</span>;
}
