// Alerts as marks on charts. Pure.
import type { Alert, Severity } from '../api.ts';
import { pxOf, type Margin, type Range } from './axis.ts';
import type { Mark } from './figure.ts';

const NEAR_PX = 7;

export const severityColor = (severity: Severity, palette: { accent: string; warn: string; bad: string }): string =>
  severity === 'info' ? palette.accent : severity === 'warning' ? palette.warn : palette.bad;

/** The alerts of a run as seen by the chart of `metric`: its own ones first, so that they win a shared pixel. */
export function marksFor(alerts: readonly Alert[], metric: string, palette: { accent: string; warn: string; bad: string }): Mark[] {
  const marks = alerts.map((alert) => ({
    firstStep: alert.first_step, lastStep: alert.last_step, color: severityColor(alert.severity, palette), own: alert.metric === metric, title: `${alert.severity}: ${alert.title}`,
  }));
  return marks.sort((a, b) => Number(b.own) - Number(a.own));
}

/** Title of the mark within reach of the pointer, or of the stretch under it. */
export function nearestMark(marks: readonly Mark[], px: number, width: number, margin: Margin, range: Range): string | null {
  const near = marks.find((mark) => Math.abs(pxOf(mark.firstStep, width, margin, range) - px) <= NEAR_PX);
  const inside = near ?? marks.find((mark) => mark.own && pxOf(mark.firstStep, width, margin, range) <= px && px <= pxOf(mark.lastStep, width, margin, range));
  return inside?.title ?? null;
}
