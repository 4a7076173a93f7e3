import torch


def attention(Q, K, V):
    batch, heads, q_len, dim = Q.shape
    kv_len = K.shape[2]
    scale = 0.08838834764831845  # 1 / sqrt(128)
    neg_inf = float("-inf")

    # Rows that see no key keep these values.
    O = torch.zeros((batch, heads, q_len, dim), dtype=torch.float16, device=Q.device)
    LSE = torch.full((batch, heads, q_len), neg_inf, dtype=torch.float32, device=Q.device)
    if batch == 0 or heads == 0 or q_len == 0 or kv_len == 0:
        return O, LSE

    Kt = K.float().transpose(-1, -2)  # (batch, heads, dim, kv_len)
    Vf = V.float()                    # (batch, heads, kv_len, dim)

    # Block of queries such that one block of scores has at most about 2^28 elements.
    block = max(1, min(q_len, (1 << 28) // (batch * heads * kv_len)))
    offset = kv_len - q_len           # position of query 0

    for start in range(0, q_len, block):
        end = min(start + block, q_len)
        # Keys seen by the last query of this block: 0 .. (end - 1 + offset)
        n_keys = min(kv_len, end + offset)
        if n_keys <= 0:
            continue                  # no query of this block sees a key

        q = Q[:, :, start:end].float() * scale
        s = torch.matmul(q, Kt[:, :, :, :n_keys])      # (batch, heads, rows, n_keys)

        p = torch.arange(start, end, device=Q.device) + offset
        k = torch.arange(n_keys, device=Q.device)
        hidden = k[None, :] > p[:, None]               # (rows, n_keys)
        s = s.masked_fill(hidden, neg_inf)

        m = s.amax(dim=-1, keepdim=True)
        m = m.masked_fill(m == neg_inf, 0.0)           # rows that see no key
        e = torch.exp(s - m)
        z = e.sum(dim=-1, keepdim=True)

        o = torch.matmul(e, Vf[:, :, :n_keys])
        o = o / z.masked_fill(z == 0, 1.0)

        O[:, :, start:end] = o.to(torch.float16)
        LSE[:, :, start:end] = (m + torch.log(z)).squeeze(-1)

    return O, LSE
