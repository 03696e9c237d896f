// What is wrong with a page as it is drawn now, where its landmarks are, and its colours; `arguments` are the landmarks.
const [landmarks] = arguments, faults = [], seen = (one) => one.checkVisibility({visibilityProperty: true});
const fault = (what, one) => faults.push(`${what}: ${(one.outerHTML ?? String(one)).slice(0, 160)}`);
const root = document.documentElement;
if (root.scrollWidth > innerWidth) fault('sideways scrolling', `${root.scrollWidth} of ${innerWidth}`);
if (document.querySelectorAll('main').length !== 1 || document.querySelectorAll('h1').length !== 1) fault('no main, or no h1', root);
if (!root.lang || !document.title) fault('no language or title', root);
for (const one of document.querySelectorAll('svg:not([aria-hidden=true])'))
  if (one.getAttribute('role') !== 'img' || !one.getAttribute('aria-label')?.trim()) fault('no text alternative', one);
for (const one of document.querySelectorAll('img')) if (!one.alt) fault('no text alternative', one);
for (const one of document.querySelectorAll('input, select, textarea'))
  if (!one.getAttribute('aria-label') && !one.labels.length) fault('no label', one);
for (const one of document.querySelectorAll('button, a')) if (!one.textContent.trim()) fault('no name', one);
for (const one of document.querySelectorAll('thead th')) if (one.scope !== 'col') fault('no scope', one);
// Levels of headings are not skipped.
let level = 0;
for (const one of document.querySelectorAll('h1, h2, h3, h4')) {
  const own = Number(one.tagName[1]);
  if (own > level + 1) fault('a level of headings is skipped', one);
  level = own;
}
// Nothing drawn is cut off.
for (const svg of document.querySelectorAll('svg')) {
  if (!seen(svg) || !svg.viewBox.baseVal) continue;
  const box = svg.viewBox.baseVal;
  for (const one of svg.querySelectorAll('text')) {
    const own = one.getBBox();
    if (own.width && (own.x < -0.5 || own.y < -1 || own.x + own.width > box.width + 0.5 || own.y + own.height > box.height + 2))
      fault('a label is cut', one);
  }
}
const rgb = (text) => text.match(/[\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
const luminance = (color) => {
  const [r, g, b] = color.map((one) => ((one /= 255) <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const grounds = new Map();
const ground = (one) => {
  if (!one) return rgb(getComputedStyle(root).backgroundColor);
  if (!grounds.has(one)) {
    const own = rgb(getComputedStyle(one).backgroundColor);
    grounds.set(one, own[3] === 0 ? ground(one.parentElement) : over(own, ground(one.parentElement)));
  }
  return grounds.get(one);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const one = node.parentElement;
  if (!node.data.trim() || !seen(one) || ['SCRIPT', 'STYLE', 'OPTION', 'TITLE', 'title'].includes(one.tagName)) continue;
  const style = getComputedStyle(one), svg = one.ownerSVGElement;
  if (!svg && style.overflow !== 'visible' && one.scrollWidth > one.clientWidth + 1 && style.overflowX !== 'auto') fault('text is cut', one);
  const [light, dark] = [luminance(over(rgb(svg ? style.fill : style.color), ground(svg ? svg.parentElement : one))), luminance(ground(svg ? svg.parentElement : one))]
    .sort((a, b) => b - a);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 600);
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < (large ? 3 : 4.5)) fault(`contrast ${contrast.toFixed(2)}`, one);
  // A word is on one line, but in code and ids, and but for Chinese.
  if (svg || one.closest('pre, code, .code, textarea, .tool, h1')) continue;
  for (const found of node.data.matchAll(/[A-Za-z]{4,24}/g)) {
    range.setStart(node, found.index);
    range.setEnd(node, found.index + found[0].length);
    if (range.getClientRects().length > 1) fault(`the word ${found[0]} is broken`, one);
  }
}
const layout = {};
for (const selector of landmarks) {
  const places = new Set();
  for (const one of document.querySelectorAll(selector)) {
    if (!seen(one)) continue;
    const box = one.getBoundingClientRect();
    places.add(`${Math.round(box.left)}+${Math.round(box.width)}`);
  }
  if (places.size) layout[selector] = [...places].sort().join(' ');
}
const colour = (selector, name) => {
  const one = document.querySelector(selector);
  return one && getComputedStyle(one)[name];
};
const colours = {ground: colour('html', 'backgroundColor'), text: colour('body', 'color'), link: colour('a', 'color'),
  muted: colour('header .brand', 'color')};
return {faults, layout, colours};
