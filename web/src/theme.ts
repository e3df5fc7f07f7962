// Theme choice, tokens for Plotly, and the style of a curve by its index.
import { signal } from '@preact/signals';

export type ThemeChoice = 'system' | 'light' | 'dark';
export interface Tokens { ink: string; muted: string; grid: string; line: string; surface: string; accent: string; ok: string; warn: string; bad: string; font: string }

// Ten colours that stay apart for colour-blind eyes, each with its twin for the other theme; a curve keeps its index.
const LIGHT = ['#2d66f3', '#d87d4c', '#71330c', '#032ebb', '#5f2d79', '#299f9c', '#8160b5', '#a4613d', '#95385b', '#9585f4'] as const;
const DARK = ['#6670e9', '#fdce95', '#ee9138', '#4798ee', '#cf95c1', '#66f1ec', '#8874ae', '#ac731a', '#e1697c', '#b1bcfb'] as const;

const system = matchMedia('(prefers-color-scheme: dark)');
const stored = localStorage.getItem('theme');

export const choice = signal<ThemeChoice>(stored === 'light' || stored === 'dark' ? stored : 'system');
/** Counts theme changes; charts that read it redraw. */
export const themeVersion = signal(0);
let cached: Tokens | null = null;

export const isDark = (): boolean => document.documentElement.dataset['theme'] === 'dark';

export function tokens(): Tokens {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  const read = (name: string): string => style.getPropertyValue(`--${name}`).trim();
  return (cached = {
    ink: read('ink'), muted: read('muted'), grid: read('grid'), line: read('line'), surface: read('surface'), accent: read('accent'),
    ok: read('ok'), warn: read('warn'), bad: read('bad'), font: read('font'),
  });
}

export const curveColor = (index: number): string => (isDark() ? DARK : LIGHT)[index % 10]!;

function apply(): void {
  const dark = choice.value === 'system' ? system.matches : choice.value === 'dark';
  document.documentElement.dataset['theme'] = dark ? 'dark' : 'light';
  cached = null;
  themeVersion.value++;
}

export function chooseTheme(next: ThemeChoice): void {
  choice.value = next;
  if (next === 'system') localStorage.removeItem('theme');
  else localStorage.setItem('theme', next);
  apply();
}

system.addEventListener('change', apply);
