import torch

SCALE = 0.07216878365  # 1 / sqrt(192)
MAX_SCORES = 1 << 28   # most score elements held at once (fp32: 1 GiB)


def attention(Q, K, V):
    batch, heads, q_len, _ = Q.shape
    kv_len = K.shape[2]
    v_dim = V.shape[3]
    device = Q.device

    # Rows that see no key keep these values.
    O = torch.zeros((batch, heads, q_len, v_dim), dtype=torch.float16, device=device)
    LSE = torch.full((batch, heads, q_len), float("-inf"), dtype=torch.float32, device=device)
    if batch == 0 or heads == 0 or q_len == 0 or kv_len == 0:
        return O, LSE

    Kt = K.to(torch.float32).transpose(-1, -2)  # (batch, heads, 192, kv_len)
    Vf = V.to(torch.float32)                    # (batch, heads, kv_len, 128)

    offset = kv_len - q_len  # position of query i is i + offset
    block = MAX_SCORES // (batch * heads * kv_len)
    block = max(1, min(q_len, block))

    # Queries before this one have a negative position and see no key.
    first = max(0, -offset)

    for start in range(first, q_len, block):
        stop = min(q_len, start + block)
        # The last query of the block sees keys 0 .. stop - 1 + offset.
        n_keys = min(kv_len, stop + offset)
        if n_keys <= 0:
            continue

        Qf = Q[:, :, start:stop, :].to(torch.float32)
        S = torch.matmul(Qf, Kt[:, :, :, :n_keys]) * SCALE

        pos = torch.arange(start, stop, device=device) + offset
        key = torch.arange(n_keys, device=device)
        hidden = key[None, :] > pos[:, None]
        S = S.masked_fill_(hidden, float("-inf"))

        m = S.amax(dim=-1, keepdim=True)
        m = torch.where(m == float("-inf"), torch.zeros_like(m), m)
        P = S.sub_(m).exp_()
        Z = P.sum(dim=-1, keepdim=True)

        acc = torch.matmul(P, Vf[:, :, :n_keys, :])
        divisor = torch.where(Z == 0, torch.ones_like(Z), Z)
        O[:, :, start:stop, :] = (acc / divisor).to(torch.float16)
        LSE[:, :, start:stop] = (torch.log(Z) + m).squeeze(-1)

    return O, LSE
