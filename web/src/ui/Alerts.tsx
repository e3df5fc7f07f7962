// Alerts of a run: a banner while something fires, and the list with what happened, where, and what to do.
import { useSignal } from '@preact/signals';
import type { Alert } from '../api.ts';
import { toValue } from '../api.ts';
import { formatAgo, formatNumber, formatStep } from '../format.ts';
import { SeverityBadge, severityTone } from './state.tsx';
import { Icon } from './icons.tsx';

const FIRST_SHOWN = 4;

interface Props { alerts: readonly Alert[]; now: number; onPick(alert: Alert): void }

const steps = (alert: Alert): string =>
  alert.last_step > alert.first_step ? `steps ${formatStep(alert.first_step)}–${formatStep(alert.last_step)}` : `step ${formatStep(alert.first_step)}`;

export function AlertBanner({ alerts, onPick }: Omit<Props, 'now'>) {
  const firing = alerts.filter((alert) => alert.state === 'firing');
  const first = worst(firing);
  if (!first) return null;
  return (
    <div class={`banner ${severityTone(first.severity)}`} role="status">
      <Icon name="alert" />
      <SeverityBadge severity={first.severity} />
      <strong>{first.title}</strong>
      <span class="muted">{steps(first)}{first.layer && !first.title.includes(first.layer) ? ` · first in ${first.layer}` : ''}</span>
      {firing.length > 1 && <span class="muted">and {firing.length - 1} more</span>}
      <button type="button" onClick={() => onPick(first)}>Show on charts</button>
    </div>
  );
}

const RANK = ['info', 'warning', 'error', 'critical'];

/** The most severe; of equals the one that came first, since the others may follow from it. */
const worst = (alerts: readonly Alert[]): Alert | undefined =>
  [...alerts].sort((a, b) => RANK.indexOf(b.severity) - RANK.indexOf(a.severity) || a.opened_s - b.opened_s)[0];

export function AlertList({ alerts, now, onPick }: Props) {
  const all = useSignal(false);
  if (!alerts.length) return null;
  const shown = all.value ? alerts : alerts.slice(0, FIRST_SHOWN);
  const firing = alerts.filter((alert) => alert.state === 'firing');
  const numFiring = firing.length;
  const opened = worst(firing)?.id;
  return (
    <section class="alerts" aria-label="Alerts">
      <h2 class="section-title">Alerts <small>{numFiring ? `${numFiring} firing · ` : ''}{alerts.length} in total</small></h2>
      <ul>{shown.map((alert) => <AlertRow key={alert.id} alert={alert} open={alert.id === opened} now={now} onPick={onPick} />)}</ul>
      {alerts.length > FIRST_SHOWN && <button type="button" class="quiet" onClick={() => { all.value = !all.value; }}>{all.value ? 'Show fewer' : `Show all ${alerts.length}`}</button>}
    </section>
  );
}

function AlertRow({ alert, open, now, onPick }: { alert: Alert; open: boolean; now: number; onPick(alert: Alert): void }) {
  return (
    <li class={`alert ${severityTone(alert.severity)} ${alert.state}`} data-alert={alert.id} data-rule={alert.rule}>
      <details open={open}>
        <summary>
          <Icon name="chevron" />
          <SeverityBadge severity={alert.severity} />
          <span class="alert-title">{alert.title}</span>
          <span class={`badge ${alert.state === 'firing' ? 'bad' : 'plain'}`}>{alert.state === 'firing' ? '● firing' : '✓ resolved'}</span>
          <span class="muted when">{steps(alert)} · {formatAgo(alert.opened_s, now)}</span>
        </summary>
        <div class="alert-body">
          <p class="explanation">{alert.explanation}</p>
          {alert.advice && <p class="advice"><strong>What to do</strong> {alert.advice}</p>}
          <div class="alert-foot"><AlertFacts alert={alert} /><button type="button" onClick={() => onPick(alert)}>Zoom charts to {alert.last_step > alert.first_step ? 'these steps' : 'this step'}</button></div>
        </div>
      </details>
    </li>
  );
}

function AlertFacts({ alert }: { alert: Alert }) {
  const number = (value: Alert['value']): string | null => { const v = toValue(value); return v === null ? null : formatNumber(v); };
  // What the agent has proved brings figures of its own, after its title, text and advice; its value is a count.
  const proved = alert.facts.slice(3).map((fact): [string, string] => { const [name = '', ...rest] = fact.split(' = '); return [name.replaceAll('_', ' '), rest.join(' = ')]; });
  const facts: [string, string | null][] = alert.rule === 'check' ? [
    ['metric', alert.metric], ['rank', alert.rank === null ? null : String(alert.rank)], ['times true', number(alert.worst_value)], ...proved,
  ] : [
    ['metric', alert.metric], ['first layer', alert.layer], ['layers', alert.num_layers > 1 ? formatStep(alert.num_layers) : null],
    ['rank', alert.rank === null ? null : String(alert.rank)], ['value', number(alert.value)], ['worst', number(alert.worst_value)], ['usual', number(alert.baseline)],
    ['bound', number(alert.threshold)], ['breaches', alert.count > 1 ? formatStep(alert.count) : null],
  ];
  return <dl class="facts">{facts.filter(([, value]) => value).map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>;
}
