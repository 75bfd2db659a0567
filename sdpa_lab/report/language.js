"use strict";

// The page has every text in both languages; the language of its root decides which is shown.
const Language = (() => {
  const words = JSON.parse(document.getElementById("words").textContent);
  const root = document.documentElement;

  function say(name, values = {}) {
    return words[name][root.lang].replace(/{(\w+)}/g, (_, value) => values[value]);
  }

  // What an element says from now on, in whatever language.
  function write(element, name) {
    element.dataset.say = name;
    element.textContent = say(name);
  }

  function speak(language) {
    root.lang = language;
    document.title = say(root.dataset.title);
    for (const text of document.querySelectorAll("[data-say]")) write(text, text.dataset.say);
    for (const element of document.querySelectorAll("[data-label]")) {
      element.setAttribute("aria-label", say(element.dataset.label));
    }
    for (const button of document.querySelectorAll("[data-language]")) {
      button.setAttribute("aria-pressed", button.dataset.language === language);
    }
    document.dispatchEvent(new Event("language"));
  }

  for (const button of document.querySelectorAll("[data-language]")) {
    button.addEventListener("click", () => speak(button.dataset.language));
  }
  document.addEventListener("DOMContentLoaded", () => speak(root.lang));
  return { say, write };
})();
