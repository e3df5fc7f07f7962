// One socket for the page: subscriptions by run, reconnection with a growing, jittered wait.
import { signal } from '@preact/signals';
import type { Alert, Run, WireFloat } from './api.ts';

export interface PointsMessage { type: 'points'; run: string; series: { metric: string; steps: number[]; values: WireFloat[] }[]; layers_step?: number | null }
export type LiveMessage =
  | PointsMessage
  | { type: 'alert'; run: string; alert: Alert }
  | { type: 'run'; run: Run }
  | { type: 'metrics'; run: string }
  | { type: 'resync'; run: string | null; reason: string };

export interface Subscriber {
  onMessage(message: LiveMessage): void;
  /** The socket is up and the subscription sent; `again` is false the first time. What was missed is to be asked for now. */
  onOpen(again: boolean): void;
}

export type Connection = 'connecting' | 'live' | 'lost';
export const connection = signal<Connection>('connecting');

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 5_000;

interface Entry { run: string | null; subscriber: Subscriber; opened: boolean }
const entries = new Set<Entry>();
let socket: WebSocket | null = null;
let waitMs = FIRST_WAIT_MS;
let timer: ReturnType<typeof setTimeout> | undefined;

const send = (type: 'subscribe' | 'unsubscribe', run: string | null): void => {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type, run }));
};

/** `run` null: the runs list. Returns what ends the subscription. */
export function subscribe(run: string | null, subscriber: Subscriber): () => void {
  const entry: Entry = { run, subscriber, opened: false };
  entries.add(entry);
  if (socket?.readyState === WebSocket.OPEN) open(entry);
  else connect();
  return () => {
    entries.delete(entry);
    if (![...entries].some((other) => other.run === run)) send('unsubscribe', run);
  };
}

function open(entry: Entry): void {
  send('subscribe', entry.run);
  const again = entry.opened;
  entry.opened = true;
  entry.subscriber.onOpen(again);
}

function connect(): void {
  if (socket && socket.readyState <= WebSocket.OPEN) return;
  clearTimeout(timer);
  const address = new URL('api/v1/live', document.baseURI);
  address.protocol = address.protocol === 'https:' ? 'wss:' : 'ws:';
  const mine = (socket = new WebSocket(address));
  mine.onopen = () => {
    waitMs = FIRST_WAIT_MS;
    connection.value = 'live';
    entries.forEach(open);
  };
  mine.onmessage = (event: MessageEvent<string>) => receive(event.data);
  mine.onclose = () => {
    if (socket !== mine) return;
    connection.value = 'lost';
    timer = setTimeout(connect, waitMs * (0.7 + Math.random() * 0.6));
    waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
  };
}

function receive(text: string): void {
  const message = JSON.parse(text) as LiveMessage | { type: 'hello' | 'problem'; message?: string };
  if (message.type === 'problem') console.warn('live feed:', message);
  if (message.type === 'problem' || message.type === 'hello' || !('run' in message)) return;
  const run = message.type === 'run' ? message.run.id : message.run;
  for (const { run: wanted, subscriber } of entries) {
    if (wanted === run || (wanted === null && message.type !== 'points') || run === null) subscriber.onMessage(message);
  }
}

// A laptop that wakes up, or a network that returns, need not wait for the timer.
addEventListener('online', () => { if (connection.value === 'lost') connect(); });
document.addEventListener('visibilitychange', () => { if (!document.hidden && connection.value === 'lost') connect(); });
