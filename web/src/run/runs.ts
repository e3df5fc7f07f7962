// The list of runs: pages from the server, kept up to date by live messages.
import { signal } from '@preact/signals';
import { listRuns, type Run } from '../api.ts';
import { subscribe } from '../live.ts';

const PAGE = 100;
const SEARCH_DELAY_MS = 200;

/** Newest first; a run that is known is replaced in its place. */
export function mergeRun(runs: readonly Run[], run: Run): Run[] {
  const at = runs.findIndex((other) => other.id === run.id);
  if (at >= 0) return runs.map((other, i) => (i === at ? { ...other, ...run } : other));
  const before = runs.findIndex((other) => other.created_s < run.created_s);
  return before < 0 ? [...runs, run] : [...runs.slice(0, before), run, ...runs.slice(before)];
}

export function matches(run: Run, search: string, state: string): boolean {
  const text = [run.name, run.id, run.project, ...run.tags].join(' ').toLowerCase();
  return (!state || run.state === state) && text.includes(search.trim().toLowerCase());
}

export class RunsModel {
  readonly runs = signal<Run[] | null>(null);
  readonly cursor = signal<string | null>(null);
  readonly error = signal<string | null>(null);
  readonly loading = signal(false);
  readonly search = signal('');
  readonly state = signal('');
  private unsubscribe: (() => void) | null = null;
  private request = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;

  start(): void {
    this.unsubscribe = subscribe(null, {
      onMessage: (message) => {
        if (message.type === 'run') this.take(message.run);
        else if (message.type === 'resync') void this.load();
      },
      onOpen: (again) => { if (again) void this.load(); },
    });
    void this.load();
  }

  stop(): void {
    this.unsubscribe?.();
    this.request.abort();
    clearTimeout(this.timer);
  }

  filter(search: string, state: string): void {
    this.search.value = search;
    this.state.value = state;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.load(), SEARCH_DELAY_MS);
  }

  load = (): Promise<void> => this.page(null);
  more = (): Promise<void> => this.page(this.cursor.value);

  private async page(cursor: string | null): Promise<void> {
    this.request.abort();
    this.request = new AbortController();
    this.loading.value = true;
    try {
      const answer = await listRuns({ search: this.search.value, state: this.state.value, cursor, limit: PAGE }, this.request.signal);
      const known = cursor === null ? [] : this.runs.value ?? [];
      this.runs.value = answer.runs.reduce((runs, run) => (runs.some((other) => other.id === run.id) ? runs : [...runs, run]), known);
      this.cursor.value = answer.next_cursor;
      this.error.value = null;
    } catch (error) {
      if ((error as Error).name === 'AbortError') return;
      this.error.value = (error as Error).message;
    }
    this.loading.value = false;
  }

  private take(run: Run): void {
    const runs = this.runs.value;
    if (!runs) return;
    const isKnown = runs.some((other) => other.id === run.id);
    if (isKnown || matches(run, this.search.value, this.state.value)) this.runs.value = mergeRun(runs, run);
  }
}
