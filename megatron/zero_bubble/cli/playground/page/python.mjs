import { loadPyodide } from './pyodide/pyodide.mjs';

const PAGE = 65536; // bytes of which a WebAssembly memory is a multiple

const ANSWER = `
import sys
sys.path.insert(0, "/package")
from megatron.zero_bubble.cli.playground.answers import answer
`;

/** Start Python with our package, whose modules are in `archive`; with its memory from `snapshot`, if it is given. */
export async function startPython(archive, { snapshot, ...options } = {}) {
  if (snapshot) {
    options._loadSnapshot = snapshot;
    options.createPyodideModule = (settings) => createWithMemory(snapshot.length, settings);
  }
  const python = await loadPyodide(options);
  // A snapshot holds what was imported, but no files.
  python.unpackArchive(archive, 'zip', { extractDir: '/package' });
  if (!snapshot) python.runPython(ANSWER);
  return python;
}

/** Create Pyodide's module with memory for a snapshot of `size` bytes, which may be taken of a memory that had grown. */
async function createWithMemory(size, settings) {
  const { default: create } = await import('./pyodide/pyodide.asm.mjs');
  const module = await create(settings);
  const memory = size - (size % PAGE); // a snapshot begins with a header, which is shorter than a page
  while (module.HEAP8.length < memory) module._malloc(memory - module.HEAP8.length); // restoring overwrites these blocks
  return module;
}
