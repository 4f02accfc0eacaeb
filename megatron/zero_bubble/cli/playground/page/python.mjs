import { loadPyodide } from './pyodide/pyodide.mjs';

const ANSWER = `
import sys
sys.path.insert(0, "/package")
from megatron.zero_bubble.cli.playground.answers import answer
`;

/** Start Python with our package, whose modules are in `archive`; with its memory from a snapshot, if options have one. */
export async function startPython(archive, options = {}) {
  const python = await loadPyodide(options);
  // A snapshot holds what was imported, but no files.
  python.unpackArchive(archive, 'zip', { extractDir: '/package' });
  if (!options._loadSnapshot) python.runPython(ANSWER);
  return python;
}
