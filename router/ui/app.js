// Puts the parts together: signs in, follows the router, says when it is lost.

import { clock, get, text } from "./dom.js";
import { follow, signedIn, signIn, signOut } from "./feed.js";
import { showMatrix, showPools, showReadings } from "./plant.js";
import { closing, ended, forget, legend, take } from "./requests.js";

let about = {};
let state = null;
let heard = 0;

const HANDLERS = {
  hello(told) {
    about = told;
    forget(); // a router that has restarted knows others
    text(get("about"), `${told.version}, registry ${told.registry}, disaggregate ${told.disaggregate}${told.allow_lossy ? ", allow_lossy" : ""}`);
    get("panel").hidden = false;
    get("sign-in").hidden = true;
    get("sign-out").hidden = !signedIn();
  },
  state(told) {
    state = told;
    get("warning").hidden = !told.warning;
    text(get("warning"), told.warning);
    showPools(told);
  },
  matrix: (told) => showMatrix(told, about),
  requests(told) {
    take(told.requests, about);
    if (state) showReadings(state, about, ended());
  },
};

function link(kind, words) {
  get("link").className = kind;
  text(get("link"), words);
  document.body.classList.toggle("stale", kind === "lost");
}

function start() {
  link("", "connecting");
  follow({
    event(name, data) {
      heard = Date.now();
      HANDLERS[name]?.(data);
      link("live", "live");
    },
    lost(error, wait) {
      const since = heard ? `; what is shown is of ${clock(heard / 1000)}` : "";
      link("lost", `${error.status ? error.message : "connection lost"}, next try in ${wait / 1000} s${since}`);
    },
    refused(error) {
      const knew = signedIn();
      signOut();
      get("panel").hidden = true;
      get("sign-in").hidden = false;
      get("sign-out").hidden = true;
      text(get("refusal"), knew || error.status === 403 ? error.message : "");
      link("", "not signed in");
      get("key").focus();
    },
  });
}

get("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(get("key").value.trim());
  get("key").value = "";
  start();
});
get("sign-out").addEventListener("click", () => { signOut(); location.reload(); });

closing();
legend();
start();
