// node processor.cjs ENGINE_DIR REQUEST REPLY: Perfetto's trace processor, as its page runs it, outside of a browser.
// REQUEST and REPLY are files with a TraceProcessorRpcStream each.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [dir, request, reply] = process.argv.slice(2), own = process;
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.importScripts = () => {};
Object.defineProperty(globalThis, "location", { value: { href: "http://x/" } });
console.warn = () => {};
const file = (url) => fs.readFileSync(path.join(dir, path.basename(String(url.url || url))));
globalThis.fetch = async (url) => new Response(file(url), { headers: { "content-type": "application/wasm" } });
globalThis.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { const bytes = file(this.url); this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length); }
};
const code = fs.readFileSync(path.join(dir, "engine_bundle.js"), "utf8");
delete globalThis.process;
Object.defineProperty(globalThis, "process", { value: undefined, writable: true, configurable: true });
vm.runInThisContext(code);
const out = fs.openSync(reply, "w"), port = { postMessage: (data) => fs.writeSync(out, data) };
globalThis.onmessage({ data: port });
setTimeout(() => {
  try { port.onmessage({ data: new Uint8Array(fs.readFileSync(request)) }); } catch (error) { console.error(error.message); own.exitCode = 1; }
}, 1500);
