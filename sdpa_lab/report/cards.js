"use strict";

// On a phone the claims are a list to open; the one that the address names is open anyway.
{
  const narrow = matchMedia("(max-width: 40rem)").matches;
  for (const claim of document.querySelectorAll(".claim")) {
    const card = claim.firstElementChild;
    card.open = `#${claim.id}` === location.hash || (card.open && !narrow);
  }
}
