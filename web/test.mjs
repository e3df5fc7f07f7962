// Runs test/*.test.ts on Node 20 and later: esbuild bundles each file first, so no Node needs to read TypeScript.
import { build } from 'esbuild';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
// Inside node_modules, so that bundles find packages and git ignores them.
const out = mkdtempSync(join(here, 'node_modules', '.test-'));
try {
  const tests = readdirSync(join(here, 'test')).filter((file) => file.endsWith('.test.ts'));
  await build({
    absWorkingDir: here,
    entryPoints: tests.map((file) => join('test', file)),
    bundle: true,
    platform: 'node',
    format: 'esm',
    target: 'node20',
    packages: 'external',
    outdir: out,
    outExtension: { '.js': '.mjs' },
    sourcemap: 'inline',
    define: { PLOTLY_FILE: '"plotly.js"' },
    external: ['*/plotly-patch.mjs'],
    logLevel: 'warning',
  });
  const files = tests.map((file) => join(out, file.replace(/\.ts$/, '.mjs')));
  const run = spawnSync(process.execPath, ['--enable-source-maps', '--test', ...files], { stdio: 'inherit', cwd: here });
  process.exitCode = run.status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
