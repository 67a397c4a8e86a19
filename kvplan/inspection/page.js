"use strict";
// Shows the title of the band that is pointed at, or has the focus, below its picture. A layer's
// text is chosen by the slider: the bands are the same in all layers.
for (const section of document.querySelectorAll("section")) {
  const slider = section.querySelector("input"), output = section.querySelector("output");
  const detail = section.querySelector(".detail"), hint = detail.textContent;
  const bands = [...section.querySelectorAll(".band")], titles = new Map();
  const layers = slider ? JSON.parse(slider.dataset.layers) : [output.textContent];
  let layer = 0, shown = null;

  function show(band) {
    shown = band || bands.find((it) => it === document.activeElement) || null;
    detail.classList.toggle("on", shown !== null);
    if (!shown) { detail.textContent = hint; return; }
    const [rows, ...facts] = titles.get(shown).split("; "), head = document.createElement("b");
    head.textContent = rows;
    detail.replaceChildren(head, [layers[layer], ...facts].join(" · "));
  }
  bands.forEach((band, number) => {
    const title = band.querySelector("title");
    titles.set(band, title.textContent);
    band.setAttribute("aria-label", title.textContent);
    band.setAttribute("role", "img");
    band.setAttribute("tabindex", number ? "-1" : "0");
    title.remove();  // the browser would show the same once more
    band.addEventListener("pointerenter", () => show(band));
    band.addEventListener("pointerleave", () => show(null));
    band.addEventListener("focus", () => show(band));
    band.addEventListener("blur", () => show(null));
    band.addEventListener("keydown", (event) => {
      const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: bands.length - 1 }[event.key];
      if (to === undefined || !bands[to]) return;
      event.preventDefault();
      band.setAttribute("tabindex", "-1"); bands[to].setAttribute("tabindex", "0"); bands[to].focus();
    });
  });
  if (slider) slider.addEventListener("input", () => {
    layer = Number(slider.value);
    output.textContent = layers[layer];
    slider.setAttribute("aria-valuetext", layers[layer]);
    show(shown);
  });
}
