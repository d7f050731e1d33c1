// Shows on the page what a node of ours has said: ComfyUI's page has no place for a node's text.

import { app } from "../../scripts/app.js";

const NODES = ["RocmSdStatus", "RocmSdSpeedTest"];
const SIZE = [460, 220];  // of a node that has something to say, at least

// A box below the node's own inputs. It goes into no prompt and no saved workflow: what was said
// belongs to the time when it was said.
function boxOf(node) {
    const element = document.createElement("textarea");
    element.readOnly = true;
    element.className = "comfy-multiline-input rocm-sd-said";
    element.placeholder = "What this node says stands here once it has run.";
    const widget = node.addDOMWidget("said", "rocm_sd_said", element, {serialize: false});
    widget.serialize = false;
    return element;
}

app.registerExtension({
    name: "rocm_sd.said",

    beforeRegisterNodeDef(nodeType, nodeData) {
        if (!NODES.includes(nodeData.name)) return;
        const {onNodeCreated, onExecuted} = nodeType.prototype;

        nodeType.prototype.onNodeCreated = function(...given) {
            const made = onNodeCreated?.apply(this, given);
            if (typeof this.addDOMWidget === "function") {
                this.rocmSdSaid = boxOf(this);
                this.setSize(this.size.map((side, which) => Math.max(side, SIZE[which])));
            }
            return made;
        };

        nodeType.prototype.onExecuted = function(message) {
            onExecuted?.call(this, message);
            if (this.rocmSdSaid && message?.text) {
                this.rocmSdSaid.value = message.text.join("\n");
            }
        };
    },
});
