// `node snapshot.mjs FOLDER` writes FOLDER/python.snapshot for the page in FOLDER: the memory of Python, compressed, once
// it has imported our package and answered the questions of FOLDER/start.json. From it Python starts in a browser without
// doing that again.
import { readFile, writeFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';
import { gzipSync } from 'node:zlib';

const folder = pathToFileURL(`${process.argv[2]}/`);
const { startPython } = await import(new URL('python.mjs', folder));
const python = await startPython(new Uint8Array(await readFile(new URL('package.zip', folder))), { _makeSnapshot: true });
const answer = python.globals.get('answer');
for (const words of JSON.parse(await readFile(new URL('start.json', folder))).questions) {
  answer(JSON.stringify({ what: 'picture', words }));
}
answer.destroy();
await writeFile(new URL('python.snapshot', folder), gzipSync(python.makeMemorySnapshot()));
