// Asks Perfetto's trace processor about a trace: node perfetto_query.js FOLDER TRACE SQL..., rows as JSON on stdout.
// FOLDER has Perfetto's engine_bundle.js with its .wasm files, which run here as they do in its user interface: in what
// looks like a worker of a browser. Requests are messages of perfetto.protos.TraceProcessorRpcStream.
"use strict";
const { webcrypto } = require("crypto"); // Node.js 18 has it under no global name
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorRpc.TraceProcessorMethod

class FileRequest {
  open(method, url) { this.url = url; }
  send() {
    const content = fs.readFileSync(path.join(folder, path.basename(this.url)));
    this.response = content.buffer.slice(content.byteOffset, content.byteOffset + content.length);
    this.status = 200;
  }
}

function varint(value) {
  const bytes = [];
  for (let rest = BigInt(value); ; rest >>= 7n) {
    if (rest < 128n) return Buffer.from([...bytes, Number(rest)]);
    bytes.push(Number(rest & 127n) | 128);
  }
}
const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const block = (field, data) => Buffer.concat([varint((field << 3) | 2), varint(data.length), data]);

function* fields(data) {
  let at = 0;
  const read = () => {
    for (let value = 0n, shift = 0n; ; shift += 7n) {
      const byte = data[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, value);
    }
  };
  while (at < data.length) {
    const key = Number(read()), kind = key & 7;
    if (kind === 0) yield [key >> 3, read()];
    else if (kind === 1) { yield [key >> 3, data.subarray(at, at + 8)]; at += 8; }
    else if (kind === 2) { const size = Number(read()); yield [key >> 3, data.subarray(at, at + size)]; at += size; }
    else throw new Error(`unexpected wire type ${kind}`);
  }
}
function* varints(data) {
  for (let at = 0; at < data.length; ) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = data[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) break;
    }
    yield BigInt.asIntN(64, value);
  }
}

function addRows(result, rows) {
  for (const [field, value] of fields(result)) {
    if (field === 1) rows.names.push(value.toString());
    if (field === 2 && value.length) throw new Error(`the query failed: ${value}`);
    if (field === 3) addBatch(value, rows);
  }
}
function addBatch(batch, rows) {
  const parts = { kinds: [], ints: [], floats: [], strings: [] };
  for (const [field, value] of fields(batch)) {
    if (field === 1) parts.kinds.push(...varints(value));
    if (field === 2) parts.ints.push(...varints(value));
    if (field === 3) for (let at = 0; at < value.length; at += 8) parts.floats.push(value.readDoubleLE(at));
    if (field === 5) parts.strings.push(...value.toString().split("\0"));
    if (field === 6) rows.last = rows.last || value !== 0n;
  }
  for (const kind of parts.kinds) {
    if (kind === 1n) rows.cells.push(null);
    else if (kind === 2n) rows.cells.push(Number(parts.ints.shift()));
    else if (kind === 3n) rows.cells.push(parts.floats.shift());
    else if (kind === 4n) rows.cells.push(parts.strings.shift());
    else throw new Error(`unexpected cell ${kind}`);
  }
}

class Port {
  constructor(Bytes) { this.Bytes = Bytes; this.sequence = 0; this.answers = []; }
  postMessage(data) { this.answers.push(Buffer.from(data)); }
  ask(method, ...args) {
    const message = Buffer.concat([number(1, ++this.sequence), number(2, method), ...args]);
    this.answers = [];
    this.onmessage({ data: new this.Bytes(block(1, message)) });
    const found = [];
    for (const answer of this.answers)
      for (const [, reply] of fields(answer))
        for (const [field, value] of fields(reply)) {
          if (field === 5) throw new Error(`the trace processor failed: ${value}`);
          if (field > 200) found.push(value);
        }
    return found;
  }
}

function open() {
  const self = { location: { href: "file:///", toString: () => "file:///" } };
  const world = vm.createContext({
    self, WorkerGlobalScope: class {}, importScripts() {}, XMLHttpRequest: FileRequest, location: self.location, URL, crypto: webcrypto,
    console: { ...console, log: console.error }, performance, setTimeout, clearTimeout, setInterval, clearInterval,
    TextDecoder, TextEncoder, queueMicrotask,
  });
  world.globalThis = world;
  vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), world);
  const port = new Port(vm.runInContext("Uint8Array", world)); // the engine looks for its own world's class
  (self.onmessage || world.onmessage)({ data: port });
  return port;
}

function main(port) {
  for (const value of port.ask(APPEND, block(101, fs.readFileSync(trace))))
    for (const [field, text] of fields(value)) if (field === 2 && text.length) throw new Error(`${trace}: ${text}`);
  port.ask(FINALIZE);
  const tables = queries.map((sql) => {
    const rows = { names: [], cells: [], last: false };
    for (const value of port.ask(QUERY, block(103, block(1, Buffer.from(sql))))) addRows(value, rows);
    if (!rows.last) throw new Error("the answer to a query is not complete");
    const width = rows.names.length, table = [];
    for (let at = 0; at < rows.cells.length; at += width)
      table.push(Object.fromEntries(rows.names.map((name, column) => [name, rows.cells[at + column]])));
    return table;
  });
  fs.writeSync(1, JSON.stringify(tables));
}

const port = open();
setTimeout(() => {
  try {
    main(port);
    process.exit(0);
  } catch (error) {
    console.error(error.stack || error);
    process.exit(1);
  }
}, 1500); // the engine begins in a task of its own
