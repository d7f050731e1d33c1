"""What the blocks of a Forge's UNet compute, for the doubles of Forge and of reForge.

`layers` is where a double's Linear, Conv2d and norms are. Forwards name only what the real ones do.
"""

import torch

GROUPS = 32


class Gated:
    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * torch.nn.functional.gelu(gate)


class Net:
    def forward(self, x):
        return self.net(x)


class Attention:
    def _layers(self, layers, query_dim, context_dim, width):
        self.to_q = layers.Linear(query_dim, width, bias=False)
        self.to_k = layers.Linear(context_dim, width, bias=False)
        self.to_v = layers.Linear(context_dim, width, bias=False)
        last = layers.Linear(width, query_dim)
        self.to_out = torch.nn.Sequential(last, torch.nn.Dropout(0.0))


class Block:
    """The real ones have more patches than these."""

    def forward(self, x, context=None, transformer_options={}):  # noqa: B006 - as there
        patches = transformer_options.get("patches", {})
        replaced = transformer_options.get("patches_replace", {})
        named = ("patches", "patches_replace")
        more = {k: transformer_options[k] for k in transformer_options if k not in named}
        more["n_heads"], more["dim_head"] = self.n_heads, self.d_head
        place = transformer_options.get("block", None)
        at = None if place is None else (*place, transformer_options.get("block_index", 0))

        def attend(attention, patch, n, given, value):
            if patch is None:
                return attention(n, context=given, value=value)
            given = n if given is None else given
            value = given if value is None else value
            q, k, v = attention.to_q(n), attention.to_k(given), attention.to_v(value)
            return attention.to_out(patch(q, k, v, more))

        n, given, value = self.norm1(x), None, None
        if "attn1_patch" in patches:
            given = value = n
            for p in patches["attn1_patch"]:
                n, given, value = p(n, given, value, more)
        first = replaced.get("attn1", {})
        n = attend(self.attn1, first.get(at, first.get(place)), n, given, value)
        for p in patches.get("attn1_output_patch", []):
            n = p(n, more)
        x = x + n
        n, given, value = self.norm2(x), context, None
        if "attn2_patch" in patches:
            value = given
            for p in patches["attn2_patch"]:
                n, given, value = p(n, given, value, more)
        second = replaced.get("attn2", {})
        n = attend(self.attn2, second.get(at, second.get(place)), n, given, value)
        for p in patches.get("attn2_output_patch", []):
            n = p(n, more)
        x = x + n
        return x + self.ff(self.norm3(x))


class Transformer:
    def _ends(self, layers, channels, inner):
        kind, size = (layers.Linear, ()) if self.use_linear else (layers.Conv2d, (1,))
        self.norm = layers.GroupNorm(GROUPS, channels, eps=1e-6)
        self.proj_in, self.proj_out = (
            kind(channels, inner, *size),
            kind(inner, channels, *size),
        )

    def forward(self, x, context=None, transformer_options={}):  # noqa: B006 - as there
        shape, h = x.shape, self.norm(x)
        h = h if self.use_linear else self.proj_in(h)
        h = h.flatten(2).movedim(1, 2).contiguous()
        h = self.proj_in(h) if self.use_linear else h
        for i, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = i
            h = block(h, context=context, transformer_options=transformer_options)
        h = self.proj_out(h) if self.use_linear else h
        h = h.movedim(2, 1).reshape(shape[0], -1, shape[2], shape[3]).contiguous()
        return x + (h if self.use_linear else self.proj_out(h))


class Upsampling:
    def forward(self, x, output_shape=None):
        shape = [2 * x.shape[2], 2 * x.shape[3]] if output_shape is None else output_shape[2:]
        return self.conv(torch.nn.functional.interpolate(x, shape, None, "nearest"))


class Downsampling:
    def forward(self, x):
        return self.op(x)


class Residual:
    def _layers(self, layers, channels, emb_channels, wide):
        def half(width, *between):
            conv = layers.Conv2d(width, wide, 3, padding=1)
            norm = layers.GroupNorm(GROUPS, width)
            return torch.nn.Sequential(norm, torch.nn.SiLU(), *between, conv)

        self.h_upd = self.x_upd = torch.nn.Identity()
        self.in_layers, self.out_layers = half(channels), half(wide, torch.nn.Dropout(0.0))
        self.emb_layers = torch.nn.Sequential(torch.nn.SiLU(), layers.Linear(emb_channels, wide))
        same = wide == channels
        self.skip_connection = torch.nn.Identity() if same else layers.Conv2d(channels, wide, 1)

    def _forward(self, x, emb, transformer_options={}):  # noqa: B006 - as there
        def half(h, layers):
            if "group_norm_wrapper" not in transformer_options:
                return layers(h)
            wrapped = transformer_options["group_norm_wrapper"]
            return layers[1:](wrapped(layers[0], h, transformer_options))

        h = half(x, self.in_layers) + self.emb_layers(emb)[..., None, None]
        return self.skip_connection(x) + half(h, self.out_layers)


class Model:
    """Two levels with attention in each."""

    def _build(self, layers, sequence, attention, resnet, downsample, upsample):
        channels, wide = self.model_channels, 2 * self.model_channels
        embedded = 4 * channels
        self.time_embed = torch.nn.Sequential(
            layers.Linear(channels, embedded), torch.nn.SiLU(), layers.Linear(embedded, embedded)
        )
        if self.num_classes is not None:
            raise NotImplementedError
        first = layers.Conv2d(4, channels, 3, padding=1)
        self.input_blocks = torch.nn.ModuleList(
            [
                sequence(first),
                sequence(resnet(channels, embedded, 0.0), attention(channels)),
                sequence(downsample(channels, True)),
                sequence(resnet(channels, embedded, 0.0, wide), attention(wide)),
            ]
        )
        self.middle_block = sequence(resnet(wide, embedded, 0.0))
        self.output_blocks = torch.nn.ModuleList(
            [
                sequence(resnet(2 * wide, embedded, 0.0, wide), attention(wide)),
                sequence(resnet(wide + channels, embedded, 0.0, wide), upsample(wide, True)),
                sequence(resnet(wide + channels, embedded, 0.0, channels), attention(channels)),
                sequence(resnet(2 * channels, embedded, 0.0, channels)),
            ]
        )
        last = layers.Conv2d(channels, 4, 3, padding=1)
        self.out = torch.nn.Sequential(layers.GroupNorm(GROUPS, channels), torch.nn.SiLU(), last)

    def _step(self, x, timesteps, context, control, options):
        waves = torch.arange(1, self.model_channels + 1, device=x.device)
        emb = self.time_embed((timesteps[:, None] / waves).cos().to(x.dtype))
        modifiers, patches = options.get("block_modifiers", []), options.get("patches", {})

        def within(place, block, h, shape=None):
            options["block"] = place
            for modifier in modifiers:
                h = modifier(h, "before", options)
            h = block(h, emb, context, options, shape)
            for modifier in modifiers:
                h = modifier(h, "after", options)
            return h

        h, hs = x, []
        for index, block in enumerate(self.input_blocks):
            h = within(("input", index), block, h)
            hs.append(h)
        h = within(("middle", 0), self.middle_block, h)
        if control is not None and control.get("middle"):
            h += control["middle"].pop()
        for index, block in enumerate(self.output_blocks):
            other = hs.pop()
            for patch in patches.get("output_block_patch", []):
                h, other = patch(h, other, options)
            h = torch.cat([h, other], dim=1)
            h = within(("output", index), block, h, hs[-1].shape if hs else None)
        if "group_norm_wrapper" in options:
            h = options["group_norm_wrapper"](self.out[0], h, options)
            return self.out[1:](h)
        return self.out(h)
