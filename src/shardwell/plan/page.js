'use strict';
// An evaluator of trees, and what shows their numbers. There is no formula here: all of them are in the trees.
const data = JSON.parse(document.querySelector('#data').textContent);

function evaluated(tree, values) {
  if (typeof tree === 'number') return BigInt(tree);
  if (typeof tree === 'string') return /^-?\d/.test(tree) ? BigInt(tree) : values[tree];
  const numbers = tree.slice(1).map(one => evaluated(one, values));
  switch (tree[0]) {
    case '+': return numbers.reduce((a, b) => a + b, 0n);
    case '*': return numbers.reduce((a, b) => a * b, 1n);
    case 'max': return numbers.reduce((a, b) => a > b ? a : b);
    case '//': return -ceiling(-numbers[0], numbers[1]);
    case 'ceil': return ceiling(numbers[0], numbers[1]);
  }
  throw new Error('no operator ' + tree[0]);
}
function ceiling(a, b) { return a > 0n ? (a + b - 1n) / b : a / b; } // BigInt divides towards zero
function sum(parts) { return Object.values(parts).reduce((a, b) => a + b, 0n); }
function each(trees, values) {
  return Object.fromEntries(Object.entries(trees).map(([key, tree]) => [key, evaluated(tree, values)]));
}
function numbersAt(forms, point) {
  const values = Object.fromEntries(Object.entries(point).map(([name, value]) => [name, BigInt(value)]));
  values.ranks = values.nodes * values.per_node;
  for (const [name, tree] of Object.entries(forms.shards)) values[name] = evaluated(tree, values);
  const peaks = {}, parts = {};
  for (const [key, instants] of Object.entries(forms.peaks)) {
    const found = instants.map(one => each(one, values)).reduce((a, b) => sum(a) >= sum(b) ? a : b);
    peaks[key] = sum(found); parts[key] = found;
  }
  return { rest: each(forms.rest, values), peaks, parts, traffic: each(forms.traffic, values) };
}

// ------------------------------------------------------------------------------------------------------- what is shown
function human(size) {
  let number = Number(size), unit = 'B';
  for (const next of ['KiB', 'MiB', 'GiB', 'TiB']) if (Math.abs(number) >= 1024) { number /= 1024; unit = next; }
  return (unit === 'B' ? number.toFixed(0) : number.toFixed(1)) + ' ' + unit;
}
function made(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
function bar(label, parts, room) {
  const total = sum(parts), scale = Number(room && room > total ? room : total) || 1;
  const track = made('div', { class: 'track' });
  for (const state of Object.keys(data.colours)) {
    const size = parts[state] || 0n;
    if (size <= 0n) continue;
    const text = state + ': ' + human(size), width = 100 * Number(size) / scale;
    const piece = made('i', { title: text, style: `width:${width}%` }); // the page's policy has inline styles
    piece.style.background = data.colours[state];
    track.append(piece);
  }
  if (room) {
    const line = made('b', { title: 'room: ' + human(room) });
    line.style.left = `calc(${100 * Number(room) / scale}% - 2px)`;
    track.append(line);
  }
  const said = human(total) + (room ? ' of ' + human(room) : '');
  const over = room && total > room;
  return made('div', { class: over ? 'level over' : 'level' },
    made('div', { class: 'name' }, made('span', {}, label), made('strong', {}, said)), track);
}
function scaled(parts, factor) {
  return Object.fromEntries(Object.entries(parts).map(([key, value]) => [key, value * factor]));
}
function ofTier(rest, tier) {
  return Object.fromEntries(Object.entries(rest).filter(([key]) => key.endsWith(' ' + tier))
    .map(([key, size]) => [key.slice(0, -tier.length - 1), size]));
}
function levels(found, perNode) {
  const bars = [], bad = [];
  for (const tier of ['device', 'host', 'disk']) {
    const factor = tier === 'device' ? 1n : BigInt(perNode);
    const room = data.room[tier] === null ? null : BigInt(data.room[tier]);
    const keys = data.moments.map(moment => moment + ' ' + tier).filter(key => found.peaks[key] !== undefined);
    if (!keys.length) continue;
    const key = keys.reduce((a, b) => found.peaks[a] >= found.peaks[b] ? a : b);
    if (found.peaks[key] === 0n) continue;
    const place = tier === 'device' ? 'device' : tier + ' of a node', moment = key.split(' ')[0];
    bars.push(bar(`${place}, peak in the ${moment}`, scaled(found.parts[key], factor), room));
    bars.push(bar(`${place}, between steps`, scaled(ofTier(found.rest, tier), factor), room));
    if (room && found.peaks[key] * factor > room)
      bad.push(`${human(found.peaks[key] * factor)} on the ${place} where ${human(room)} may be used`);
  }
  document.querySelector('#bars').replaceChildren(...bars);
  const verdict = document.querySelector('#verdict');
  verdict.textContent = bad.length ? 'It does not fit: it needs ' + bad.join(', ') + '.' : 'It fits.';
  verdict.className = bad.length ? 'over' : 'fits';
}
function table(found) {
  const kinds = [...new Set(Object.keys(found.traffic).map(key => key.split(' ')[0]))];
  const cells = kind => ['inside', 'between'].map(hop => human(found.traffic[kind + ' ' + hop] || 0n));
  const row = (name, texts) => made('tr', {}, ...texts.map(text => made(name, {}, text)));
  const rows = kinds.map(kind => row('td', [data.kinds[kind] || kind, ...cells(kind)]));
  const head = row('th', ['received in a step', 'inside the node', 'between nodes']);
  document.querySelector('#traffic').replaceChildren(made('table', {}, head, ...rows));
}

// ------------------------------------------------------------------------------------------------------------ the panel
const controls = ['stage', 'optimizer', 'parameters', 'codec'];
function control(name) { return document.querySelector('#' + name); }
function keyOf(choice) { return controls.map(name => choice[name]).join(' '); }
function chosen() { return Object.fromEntries(controls.map(name => [name, control(name).value])); }
function settle() {
  const choice = chosen();
  if (!data.forms[keyOf(choice)]) {
    for (const name of controls.slice(1)) control(name).value = 'none';
    Object.assign(choice, chosen());
    if (!data.forms[keyOf(choice)]) { // not even without tiers and codecs: any class of the stage, or of another one
      const keys = Object.keys(data.forms), key = keys.find(one => one[0] === choice.stage) || keys[0];
      key.split(' ').forEach((value, place) => { control(controls[place]).value = value; });
      Object.assign(choice, chosen());
    }
  }
  const places = data.places[keyOf(choice)];
  for (const option of control('ranks').options) option.disabled = !places.includes(option.value);
  if (!places.includes(control('ranks').value)) control('ranks').value = data.place;
  for (const name of controls) for (const option of control(name).options) {
    const other = { ...choice, [name]: option.value };
    const any = name === 'stage' && Object.keys(data.forms).some(key => key.startsWith(option.value + ' '));
    option.disabled = !any && !data.forms[keyOf(other)];
  }
  return choice;
}
function whole(name) {
  const box = control(name), step = Number(box.step) || 1;
  const value = Math.max(step, Math.round((Number(box.value) || step) / step) * step);
  return Math.min(value, Number(box.max));
}
function point() {
  const [nodes, perNode] = control('ranks').value.split('x').map(Number);
  return { nodes, per_node: perNode, batch: whole('batch'), sequence: whole('sequence'), depth: data.depth };
}
function show() {
  const choice = settle(), at = point(), found = numbersAt(data.forms[keyOf(choice)], at);
  levels(found, at.per_node); table(found);
  document.querySelector('#command').textContent = `shardwell plan ${data.model} --gpus ${at.nodes * at.per_node} `
    + `--nodes ${at.nodes} --gpu ${data.gpu} --seq ${at.sequence} --micro-batch ${at.batch} --config zero.json`;
  document.querySelector('#config').textContent = JSON.stringify(data.configs[keyOf(choice)], null, 2);
}
if (data.forms) {
  for (const name of [...controls, 'ranks', 'batch', 'sequence']) control(name).addEventListener('input', show);
  for (const name of ['batch', 'sequence'])
    control(name).addEventListener('change', () => { control(name).value = whole(name); show(); });
  show();
} else {
  const big = sizes => Object.fromEntries(Object.entries(sizes).map(([key, size]) => [key, BigInt(size)]));
  const plan = data.plan, peaks = big(plan.peaks), parts = {};
  for (const [key, size] of Object.entries(peaks)) parts[key] = { 'all states': size };
  const highest = data.moments.map(moment => moment + ' device').reduce((a, b) => peaks[a] >= peaks[b] ? a : b);
  parts[highest] = big(plan.at_peak);
  const found = { rest: big(plan.rest), peaks, parts, traffic: big(plan.traffic) };
  levels(found, data.per_node); table(found);
}
globalThis.numbersAt = (key, at) => numbersAt(data.forms[key], at);
