// Double of script.js, as far as extensions' scripts use it.
//
// The surface was read in script.js of lshqqytiger/stable-diffusion-webui-amdgpu e61adddd: the names,
// when each kind of callback is called, and that an error in one does not keep the others from it.

const uiUpdateCallbacks = [];
const uiAfterUpdateCallbacks = [];
const uiLoadedCallbacks = [];
const uiTabChangeCallbacks = [];

function gradioApp() {
    const app = document.querySelector("gradio-app");
    return app?.shadowRoot ?? app ?? document;
}

function onUiUpdate(callback) {
    uiUpdateCallbacks.push(callback);
}

function onAfterUiUpdate(callback) {
    uiAfterUpdateCallbacks.push(callback);
}

function onUiLoaded(callback) {
    uiLoadedCallbacks.push(callback);
}

function onUiTabChange(callback) {
    uiTabChangeCallbacks.push(callback);
}

document.addEventListener("DOMContentLoaded", () => {
    const AFTER_UPDATE_MS = 200;
    let loaded = false;
    let afterUpdate = 0;
    let shownTab = null;

    function call(callbacks, argument) {
        for (const callback of callbacks) {
            try {
                callback(argument);
            } catch (error) {
                console.error("error in a callback:", error);
            }
        }
    }

    new MutationObserver((records) => {
        if (!loaded && gradioApp().querySelector("#txt2img_prompt")) {
            loaded = true;
            call(uiLoadedCallbacks);
        }
        call(uiUpdateCallbacks, records);
        clearTimeout(afterUpdate);
        afterUpdate = setTimeout(() => call(uiAfterUpdateCallbacks), AFTER_UPDATE_MS);
        const tab = gradioApp().querySelector("#tabs > .tab-nav > button.selected");
        if (tab && tab !== shownTab) {
            shownTab = tab;
            call(uiTabChangeCallbacks);
        }
    }).observe(gradioApp(), {childList: true, subtree: true});
});
