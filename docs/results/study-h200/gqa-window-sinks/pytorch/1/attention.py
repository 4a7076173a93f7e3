import torch

SCALE = 0.08838834764831845  # 1 / sqrt(128)
SOFTCAP = 30.0
WINDOW = 512
SINKS = 2
CHUNK = 256  # queries handled at a time, to bound the memory used


def attention(Q, K, V):
    batch, heads, q_len, dim = Q.shape
    kv_heads, kv_len = K.shape[1], K.shape[2]
    dim_v = V.shape[3]
    group = heads // kv_heads
    device = Q.device
    offset = kv_len - q_len  # position of query 0

    # Rows that see no key keep these values.
    O = torch.zeros((batch, heads, q_len, dim_v), dtype=torch.float16, device=device)
    LSE = torch.full((batch, heads, q_len), float("-inf"), dtype=torch.float32, device=device)

    for i0 in range(0, q_len, CHUNK):
        i1 = min(i0 + CHUNK, q_len)
        n = i1 - i0
        p_first = i0 + offset
        p_last = i1 - 1 + offset

        # Keys lo .. hi-1 cover the causal windows of all the rows of this chunk.
        hi = min(kv_len, p_last + 1)
        if hi <= 0:
            continue  # every row of the chunk lies before the first key
        lo = max(0, p_first - (WINDOW - 1))
        n_sink = min(SINKS, lo)  # sink keys that are not already in lo .. hi-1

        k_idx = torch.arange(lo, hi, device=device)
        k = K[:, :, lo:hi]
        v = V[:, :, lo:hi]
        if n_sink > 0:
            k_idx = torch.cat([torch.arange(0, n_sink, device=device), k_idx])
            k = torch.cat([K[:, :, :n_sink], k], dim=2)
            v = torch.cat([V[:, :, :n_sink], v], dim=2)
        k = k.to(torch.float32)
        v = v.to(torch.float32)
        n_keys = k.shape[2]

        # Query head h = kv_head * group + j reads K/V head kv_head.
        q = Q[:, :, i0:i1].to(torch.float32).reshape(batch, kv_heads, group * n, dim)
        s = torch.matmul(q, k.transpose(2, 3)) * SCALE
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
        s = s.reshape(batch, kv_heads, group, n, n_keys)

        p = torch.arange(p_first, p_last + 1, device=device)[:, None]
        kk = k_idx[None, :]
        visible = (kk <= p) & ((p - kk < WINDOW) | (kk < SINKS))
        s = s.masked_fill(~visible, float("-inf"))

        m = s.amax(dim=-1, keepdim=True)
        m = torch.where(m == float("-inf"), torch.zeros_like(m), m)
        e = torch.exp(s - m)
        z = e.sum(dim=-1, keepdim=True)

        acc = torch.matmul(e.reshape(batch, kv_heads, group * n, n_keys), v)
        acc = acc.reshape(batch, kv_heads, group, n, dim_v)
        o = acc / torch.where(z == 0, torch.ones_like(z), z)
        lse = m + torch.log(z)  # log(0) = -inf for a row that sees no key

        O[:, :, i0:i1] = o.reshape(batch, heads, n, dim_v).to(torch.float16)
        LSE[:, :, i0:i1] = lse.reshape(batch, heads, n)

    return O, LSE
