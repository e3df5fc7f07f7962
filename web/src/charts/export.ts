// What leaves the page: a chart's buckets as CSV, a chart as PNG.
import { tokens } from '../theme.ts';
import type { Figure } from './figure.ts';
import { plainText } from './heat.ts';
import { plotly } from './plotly.ts';
import type { Series } from './series.ts';

/** RFC 4180; a bucket without finite values leaves mean, min and max empty. */
export function toCsv(series: Series): string {
  const { step, count, mean, min, max, nan, pos_inf, neg_inf } = series.points;
  const cell = (value: number): string => (Number.isNaN(value) ? '' : String(value));
  const rows = step.map((_, i) => [step, count, mean, min, max, nan, pos_inf, neg_inf].map((list) => cell(list[i]!)).join(','));
  return ['step,count,mean,min,max,nan,pos_inf,neg_inf', ...rows, ''].join('\r\n');
}

export const fileName = (metric: string, ending: string): string => `${metric.replace(/[^\w.-]+/g, '_').slice(0, 80)}.${ending}`;

export function download(name: string, href: string): void {
  const link = document.createElement('a');
  link.href = href;
  link.download = name;
  link.click();
}

export function downloadCsv(metric: string, series: Series): void {
  const href = URL.createObjectURL(new Blob([toCsv(series)], { type: 'text/csv' }));
  download(fileName(metric, 'csv'), href);
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** Plotly's own PNG goes through a blob: image, which the page's policy does not allow; its SVG as data: is allowed. */
async function toPng(svg: string, width: number, height: number): Promise<string> {
  const image = new Image();
  image.src = svg;
  await image.decode();
  const canvas = document.createElement('canvas');
  canvas.width = width * PIXEL_RATIO;
  canvas.height = height * PIXEL_RATIO;
  const context = canvas.getContext('2d')!;
  context.scale(PIXEL_RATIO, PIXEL_RATIO);
  context.drawImage(image, 0, 0, width, height);
  return canvas.toDataURL('image/png');
}

const PIXEL_RATIO = 2;

export async function downloadPng(metric: string, draw: (width: number, height: number) => Figure | null): Promise<void> {
  const [width, height] = [900, 450];
  const figure = draw(width, height);
  if (!figure) return;
  const layout = {
    ...figure.layout, paper_bgcolor: tokens().surface, margin: { l: 64, r: 24, t: 40, b: 32 },
    title: { text: plainText(metric), font: { size: 14, color: tokens().ink }, x: 0.02, xanchor: 'left' },
  };
  const svg = await (await plotly()).toImage({ data: figure.data, layout, config: {} }, { format: 'svg', width, height, scale: 1 });
  download(fileName(metric, 'png'), await toPng(svg, width, height));
}
