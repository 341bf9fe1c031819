"""Which texts of a page are hard to read?  For tests of pages in a browser."""

from __future__ import annotations

import shutil

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Of every visible text: the contrast of its colour with what lies under it (WCAG 2.2, 1.4.3), where it is below 4.5.
CONTRAST = """() => {
  const parse = (words) => {
    const numbers = words.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
    if (words.startsWith("color(srgb")) return [...numbers.slice(0, 3).map((part) => part * 255), numbers[3] ?? 1];
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const over = (top, under) => top.slice(0, 3).map((part, at) => part * top[3] + under[at] * (1 - top[3]));
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const layer = parse(getComputedStyle(at).backgroundColor);
      layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || ["SCRIPT", "NOSCRIPT", "OPTION"].includes(element.tagName)) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    seen += 1;
    const under = background(element);
    const style = getComputedStyle(element);
    const ink = over(parse(element.tagName === "text" ? style.fill : style.color), under);
    const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
    const found = (high + 0.05) / (low + 0.05);
    const words = texts.currentNode.data.trim().slice(0, 40);
    if (found < 4.5) poor.add(`${found.toFixed(2)} ${element.tagName}.${element.className} ${words}`);
  }
  return { seen, poor: [...poor] };
}"""
