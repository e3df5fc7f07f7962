// The vendored bundle is a classic script (the browser caches its compiled code), loaded once, on the first chart.

declare const PLOTLY_FILE: string;

export interface PlotlyApi {
  react(el: HTMLElement, data: object[], layout: object, config?: object): Promise<unknown>;
  purge(el: HTMLElement): void;
  toImage(figure: { data: object[]; layout: object; config?: object }, options: { format: string; width: number; height: number; scale: number }): Promise<string>;
}

/** `showSendToCloud: false` is what removes Plotly's upload button; static, because pointer.ts owns hover and zoom. */
export const CONFIG = { staticPlot: true, displayModeBar: false, responsive: false, showSendToCloud: false, displaylogo: false } as const;

let loading: Promise<PlotlyApi> | null = null;
let loaded: PlotlyApi | null = null;

export function plotly(): Promise<PlotlyApi> {
  return (loading ??= new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = new URL(PLOTLY_FILE, document.baseURI).href;
    script.onload = () => {
      loaded = (window as unknown as { Plotly: PlotlyApi }).Plotly;
      resolve(loaded);
    };
    script.onerror = () => {
      loading = null;
      reject(new Error('the chart library could not be loaded'));
    };
    document.head.append(script);
  }));
}

/** Frees a chart's nodes. Nothing to do where Plotly never ran. */
export function purge(el: HTMLElement): void {
  loaded?.purge(el);
}
